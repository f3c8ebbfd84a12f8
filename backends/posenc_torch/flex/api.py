"""``score_mod`` and ``block_mask``, for users who call ``flex_attention`` themselves."""

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
from posenc_torch.flex.block_mask import BLOCK, BlockMaskInputs, TokenIntegers
from posenc_torch.flex.score_mod import SchemeBias, ScoreMod


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
    """The bias of a scheme, for users who call ``flex_attention`` themselves.

    ``score_mod(score, b, h, i, j)`` adds the bias of head ``h`` to the score. It applies no
    transform: call ``posenc.transform`` on queries and keys before.

    Parameters
    ----------
    scheme, params
        The positional encoding and its learned arrays by name.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``, both or neither. Default: the indices, which is
        right if queries and keys are the same tokens.
    q_features, k_features
        Features of tokens that the bias reads, by name, ``(B or 1, H or 1, L)`` or
        ``(B or 1, H or 1, L, M)``; ``posenc.features`` computes them. A scheme of several axes
        reads its places as ``"places"``, integers ``(B or 1, 1, L, axes)``.
    device
        Device of the constants. Default: that of the given tensors, or torch's default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    """
    check_scheme(scheme)
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    sides = (
        _check_features(scheme, "q_features", q_features),
        _check_features(scheme, "k_features", k_features),
    )
    tensors = [*as_mapping(params).values(), *sides[0].values(), *sides[1].values()]
    given = [a for a in (q_pos, *tensors) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    dtype = working_dtype(tensors, xp=xp)
    arrays = merge_constants(scheme, params, dtype=dtype, device=here, xp=xp)
    positions = _INDICES, _INDICES
    if q_pos is not None and k_pos is not None:
        positions = _positions("q_pos", q_pos, here), _positions("k_pos", k_pos, here)
    query, key = (
        {name: a.to(dtype) if a.is_floating_point() else a for name, a in side.items()}
        for side in sides
    )
    mod = SchemeBias.of(scheme, arrays, dtype, positions, (query, key)).score_mod
    if reads_features(scheme):
        _check_bias_reads(scheme, mod, here)
    return mod


def _check_features(
    scheme: PositionScheme, argument: str, given: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Features of one side, checked."""
    features = dict(as_mapping(given, argument))
    if features and not reads_features(scheme):
        raise ValueError(
            f"the bias of {type(scheme).__name__} reads no features of tokens: leave out {argument}"
        )
    for name, array in features.items():
        if not isinstance(array, Tensor):
            raise TypeError(f"{argument}[{name!r}] must be a tensor, got {type(array).__name__}")
        if array.ndim not in (3, 4) or not (array.is_floating_point() or name == "places"):
            accepted = "floating, (B or 1, H or 1, L) or (B or 1, H or 1, L, M)"
            shape = tuple(array.shape)
            raise ValueError(
                f"{argument}[{name!r}] must be {accepted}, got {shape} of {array.dtype}"
            )
    return features


def _check_bias_reads(scheme: PositionScheme, mod: ScoreMod, device: Any) -> None:
    """Whether the bias has every feature that it reads, at one score, before a kernel is traced."""
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
    """The block mask for ``flex_attention``, with ``O((L / 128)**2)`` work and memory.

    Parameters
    ----------
    q_len, k_len
        Lengths of queries and keys. By default the last query is at the last key.
    causal, window, sink_tokens, q_pos, k_pos, q_seg, k_seg
        As in ``posenc_torch.attention``.
    device
        Default: that of the given tensors, or torch's default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    """
    q_len, k_len = check_count("q_len", q_len), check_count("k_len", k_len)
    inputs = block_mask_inputs(
        q_len, k_len, causal=causal, window=check_window(window), sink_tokens=sink_tokens,
        q_pos=q_pos, k_pos=k_pos, q_seg=q_seg, k_seg=k_seg, device=device,
    )  # fmt: skip
    # Without padding: callers read the number of blocks. One mask serves all heads.
    q_blocks, k_blocks = -(-q_len // BLOCK), -(-k_len // BLOCK)
    visible = (blocks[:, None, :q_blocks, :k_blocks] for blocks in inputs.visible_blocks())
    return inputs.block_mask(*visible)


def block_mask_inputs(
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
) -> BlockMaskInputs:
    """The arguments of ``block_mask``, checked and completed; ``window`` is already checked."""
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    check_pair("q_seg", q_seg, "k_seg", k_seg)
    given = [a for a in (q_pos, q_seg) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    if q_pos is None or k_pos is None:
        if q_len > k_len:
            raise ValueError(f"q_len is {q_len}, k_len only {k_len}: give q_pos and k_pos")
        k_index = torch.arange(k_len, dtype=torch.int32, device=here)
        positions = (
            TokenIntegers.of(k_index[k_len - q_len :], is_index=q_len == k_len),
            TokenIntegers.of(k_index, is_index=True),
        )
    else:
        positions = _positions("q_pos", q_pos, here), _positions("k_pos", k_pos, here)
    segments = (
        None if seg is None else TokenIntegers.of(as_integers(name, seg, device=here, xp=xp))
        for name, seg in (("q_seg", q_seg), ("k_seg", k_seg))
    )
    tokens = dict(zip(("q_pos", "k_pos", "q_seg", "k_seg"), (*positions, *segments), strict=True))
    for name, integers in tokens.items():
        length = q_len if name[0] == "q" else k_len
        if integers is not None and integers.length != length:
            raise ValueError(f"{name} has length {integers.length}, {name[0]}_len is {length}")
    return BlockMaskInputs(
        *positions,
        tokens["q_seg"],
        tokens["k_seg"],
        check_flag("causal", causal),
        window,
        check_count("sink_tokens", sink_tokens, least=0),
    )


_INDICES = TokenIntegers.of(torch.zeros(0, dtype=torch.int32), is_index=True)


def _positions(name: str, pos: Tensor, device: Any) -> TokenIntegers:
    return TokenIntegers.of(as_positions(name, pos, device=device, xp=xp))
