"""A scheme's bias and who sees whom, for those who call ``flex_attention`` themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc.backend import (
    PositionScheme,
    Window,
    as_integers,
    as_mapping,
    as_positions,
    check_count,
    check_flag,
    check_pair,
    check_scheme,
    check_window,
    merge_constants,
    reads_features,
    working_dtype,
)
from posenc_torch.flex.block_mask import BLOCK, Places, Sight
from posenc_torch.flex.score_mod import Bias, ScoreMod


def score_mod(
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    *,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_features: Mapping[str, Tensor] | None = None,
    k_features: Mapping[str, Tensor] | None = None,
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
    q_features, k_features
        Features of tokens that the bias reads, by name, ``(B or 1, H or 1, L)`` or
        ``(B or 1, H or 1, L, M)``; ``posenc.features`` computes them. A scheme of several axes
        finds its places as ``"places"``, integers ``(B or 1, 1, L, axes)``.
    device
        Of its constants. Default: that of the tensors given, or torch's own default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    check_scheme(scheme)
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    found = _features(scheme, "q_features", q_features), _features(scheme, "k_features", k_features)
    tensors = [*as_mapping(params).values(), *found[0].values(), *found[1].values()]
    given = [a for a in (q_pos, *tensors) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    dtype = working_dtype(tensors, xp=xp)
    arrays = merge_constants(scheme, params, dtype=dtype, device=here, xp=xp)
    places = _INDEXED, _INDEXED
    if q_pos is not None and k_pos is not None:
        places = _given("q_pos", q_pos, here), _given("k_pos", k_pos, here)
    query, key = (
        {name: a.to(dtype) if a.is_floating_point() else a for name, a in side.items()}
        for side in found
    )
    mod = Bias.of(scheme, arrays, dtype, places, (query, key)).score_mod
    if reads_features(scheme):
        _check_read(scheme, mod, here)
    return mod


def _features(
    scheme: PositionScheme, what: str, given: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Features of one side, checked."""
    found = dict(as_mapping(given, what))
    if found and not reads_features(scheme):
        raise ValueError(
            f"the bias of {type(scheme).__name__} reads no features of tokens: leave out {what}"
        )
    for name, array in found.items():
        if not isinstance(array, Tensor):
            raise TypeError(f"{what}[{name!r}] must be a tensor, got {type(array).__name__}")
        if array.ndim not in (3, 4) or not (array.is_floating_point() or name == "places"):
            accepted = "floating, (B or 1, H or 1, L) or (B or 1, H or 1, L, M)"
            raise ValueError(
                f"{what}[{name!r}] must be {accepted}, got {tuple(array.shape)} of {array.dtype}"
            )
    return found


def _check_read(scheme: PositionScheme, mod: ScoreMod, device: Any) -> None:
    """The bias finds every feature that it reads: seen at one pair, before a kernel is traced."""
    at = torch.zeros((), dtype=torch.int32, device=device)
    try:
        with torch.no_grad():
            mod(torch.zeros((), device=device), at, at, at, at)
    except KeyError as error:
        raise ValueError(
            f"{type(scheme).__name__}: {error.args[0]}; give q_features and k_features, which "
            "posenc.features computes"
        ) from None


def block_mask(
    q_len: int,
    k_len: int,
    *,
    causal: bool = False,
    window: int | Window | None = None,
    sink_tokens: int = 0,
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
    causal, window, sink_tokens, q_pos, k_pos, q_seg, k_seg
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
        q_len, k_len, causal=causal, window=check_window(window), sink_tokens=sink_tokens,
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
    window: Window | None,
    sink_tokens: int = 0,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_seg: Tensor | None = None,
    k_seg: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Sight:
    """The arguments of ``block_mask``, checked and completed; the window is checked."""
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
    first = check_count("sink_tokens", sink_tokens, least=0)
    return Sight(*sides, q_own, k_own, check_flag("causal", causal), window, first)


_INDEXED = Places.of(torch.zeros(0, dtype=torch.int32), indexed=True)


def _given(name: str, pos: Tensor, device: Any) -> Places:
    return Places.of(as_positions(name, pos, device=device, xp=xp))
