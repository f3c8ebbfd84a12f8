"""A scheme's bias and who sees whom, for those who call ``flex_attention`` themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.call import check_pair
from posenc.checks import check_count, check_flag, check_scheme, check_window
from posenc.evaluate import is_gated
from posenc.params import merged, named, working_dtype
from posenc.positions import as_integers, as_positions
from posenc.protocol import PositionScheme
from posenc_torch.score import Bias, ScoreMod, apart
from posenc_torch.sight import BLOCK, Places, Sight


def score_mod(
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    *,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_coords: Tensor | None = None,
    k_coords: Tensor | None = None,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """The bias of a scheme, for those who call ``flex_attention`` themselves.

    ``score_mod(score, b, h, i, j)`` is the score with the bias of head ``h`` added. A transform is
    not in it: call ``posenc.transform`` on queries and keys before.

    Parameters
    ----------
    scheme, params
        The positional encoding and its learned arrays by name.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``, both or neither. Default: the indices themselves,
        as where queries and keys are the same tokens.
    q_coords, k_coords
        For a gated scheme, its coordinates ``(B, H, L)``; see ``posenc.coordinates``.
    device
        Of its constants. Default: that of the tensors given, or torch's own default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    check_scheme(scheme)
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    check_pair("q_coords", q_coords, "k_coords", k_coords)
    if is_gated(scheme) != (q_coords is not None):
        has = "has gates: give" if is_gated(scheme) else "has no gates: leave out"
        raise ValueError(f"{type(scheme).__name__} {has} q_coords and k_coords")
    given = [a for a in (q_pos, q_coords, *named(params).values()) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    dtype = working_dtype(list(named(params).values()), xp=xp)
    arrays = merged(scheme, params, dtype=dtype, device=here, xp=xp)
    places = _INDEXED, _INDEXED
    if q_pos is not None and k_pos is not None:
        places = _given("q_pos", q_pos, here), _given("k_pos", k_pos, here)
    coords = None
    if q_coords is not None and k_coords is not None:
        coords = apart(q_coords.to(dtype), k_coords.to(dtype))
    return Bias.of(scheme, arrays, dtype, places, coords).score_mod


def block_mask(
    q_len: int,
    k_len: int,
    *,
    causal: bool = False,
    window: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_seg: Tensor | None = None,
    k_seg: Tensor | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Who sees whom, as ``flex_attention`` takes it, from ``O((L / 128)**2)`` work and memory.

    Parameters
    ----------
    q_len, k_len
        Lengths of queries and keys. By default their ends align.
    causal, window, q_pos, k_pos, q_seg, k_seg
        As in ``posenc_torch.attention``.
    device
        Default: that of the tensors given, or torch's own default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    q_len, k_len = check_count("q_len", q_len), check_count("k_len", k_len)
    sight = sight_of(
        q_len, k_len, causal=causal, window=window,
        q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg, device=device,
    )  # fmt: skip
    q_blocks, k_blocks = -(-q_len // BLOCK), -(-k_len // BLOCK)  # no room: callers read the counts
    # One for all heads.
    return sight.block_mask(*(found[:, None, :q_blocks, :k_blocks] for found in sight.blocks()))


def sight_of(
    q_len: int,
    k_len: int,
    *,
    causal: bool,
    window: int | None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_seg: Tensor | None = None,
    k_seg: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Sight:
    """The arguments of ``block_mask``, checked and completed."""
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    check_pair("q_seg", q_seg, "k_seg", k_seg)
    given = [a for a in (q_pos, q_seg) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    if q_pos is None or k_pos is None:
        if q_len > k_len:
            raise ValueError(f"q_len is {q_len}, k_len only {k_len}: give q_pos and k_pos")
        k_at = torch.arange(k_len, dtype=torch.int32, device=here)
        sides = (
            Places.of(k_at[k_len - q_len :], indexed=q_len == k_len),
            Places.of(k_at, indexed=True),
        )
    else:
        sides = _given("q_pos", q_pos, here), _given("k_pos", k_pos, here)
    q_own, k_own = (
        None if seg is None else Places.of(as_integers(name, seg, device=here, xp=xp))
        for name, seg in (("q_seg", q_seg), ("k_seg", k_seg))
    )
    found = {"q_pos": sides[0], "k_pos": sides[1], "q_seg": q_own, "k_seg": k_own}
    for name, places in found.items():
        length = q_len if name[0] == "q" else k_len
        if places is not None and places.length != length:
            raise ValueError(f"{name} has length {places.length}, {name[0]}_len is {length}")
    return Sight(*sides, q_own, k_own, check_flag("causal", causal), check_window(window))


_INDEXED = Places.of(torch.zeros(0, dtype=torch.int32), indexed=True)


def _given(name: str, pos: Tensor, device: Any) -> Places:
    return Places.of(as_positions(name, pos, device=device, xp=xp))
