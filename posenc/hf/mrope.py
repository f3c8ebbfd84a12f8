"""M-RoPE of a configuration: its ``RoPE``, and which axis each channel pair belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc.contract.checks import check_count
from posenc.hf.config import as_dictionary, from_hf, read
from posenc.hf.families import family_of
from posenc.schemes.mrope import MRoPE, Order
from posenc.schemes.rope import Layout, RoPE

AXIS_SECTIONS = ("mrope_section", "xdrope_section")


def mrope_from_hf(
    config: Any,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
    layout: Order | None = None,
    pairing: Layout | None = None,
) -> MRoPE:
    """The scheme that ``MRoPE.from_hf`` describes."""
    config = as_dictionary(config)
    rope = from_hf(config, head_dim=head_dim, max_position_embeddings=max_position_embeddings)
    if not isinstance(rope, RoPE):
        raise ValueError(f"M-RoPE is one RoPE for all layers, got {rope!r}")
    part: Mapping[str, Any] = config
    for name in filter(None, read(config, head_dim=head_dim).part.split(".")):
        part = part[name]
    return mrope_of(rope, part, layout=layout, pairing=pairing)


def mrope_of(
    rope: RoPE,
    part: Mapping[str, Any],
    *,
    layout: Order | None = None,
    pairing: Layout | None = None,
) -> MRoPE:
    """``rope`` on several axes, as the part of a configuration that describes the text says."""
    given = part.get("rope_parameters") or part.get("rope_scaling") or part
    sections = next((given[name] for name in AXIS_SECTIONS if given.get(name) is not None), None)
    if sections is None:
        raise ValueError("mrope_section is missing; without it, use RoPE.from_hf")
    if layout is None:
        layout = family_of(part).mrope or _by_keys(given)
    if pairing is None and rope.layout == "interleaved":
        pairing = "interleaved"
    return MRoPE(
        rope.head_dim, [_whole(n) for n in sections], layout, rope.base, rope.rotary_dim,
        rope.scaling, pairing,
    )  # fmt: skip


def _by_keys(given: Mapping[str, Any]) -> Order:
    if given.get("xdrope_section") is not None:
        return "hunyuan"
    turns = given.get("mrope_interleaved") or given.get("interleaved")
    return "interleaved" if turns else "chunked"


def _whole(section: Any) -> int:
    """A section, which Hunyuan's configurations write as 16.0."""
    whole = isinstance(section, float) and section.is_integer()
    return check_count("mrope_section", int(section) if whole else section, least=0)
