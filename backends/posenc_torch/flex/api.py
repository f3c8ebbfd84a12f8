"""``score_mod`` and ``block_mask``, for users who call ``flex_attention`` themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from posenc import NoPE
from posenc.backend import (
    Arguments,
    Hook,
    Mask,
    PositionScheme,
    Tokens,
    Window,
    as_mapping,
    as_positions,
    check_count,
    check_pair,
    check_scheme,
    complete_mask,
    complete_sides,
    merge_constants,
    reads_features,
    working_dtype,
)
from posenc_torch.flex.block_mask import BLOCK, BlockMaskInputs, TokenIntegers
from posenc_torch.flex.score_mod import SchemeBias, ScoreMod

# What ``score_mod`` and a transform before it leave out.
_NOT_A_BIAS = {Hook.ADJUST_SCORES, Hook.CHANNEL_DECAY, Hook.REGIONS, Hook.SINK}


def score_mod(
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    *,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """The bias of a scheme, for users who call ``flex_attention`` themselves.

    ``score_mod(score, b, h, i, j)`` adds the bias of head ``h`` to the score. It applies no
    transform: call ``posenc.transform`` on queries and keys before.

    Parameters
    ----------
    scheme, params
        The positional encoding and its learned arrays by name.
    tokens, queries
        As in ``posenc_torch.attention``, of which positions and features are read; ``queries`` only
        if they are not the tokens of the keys. Default positions: the indices. Features are
        ``(B or 1, H or 1, L)`` or ``(B or 1, H or 1, L, M)``; ``posenc.features`` computes them. A
        scheme of several axes reads its places as the feature ``"places"``, integers
        ``(B or 1, 1, L, axes)``.
    device
        Device of the constants. Default: that of the given tensors, or torch's default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    NotImplementedError
        The scheme changes scores by more than a bias: whole rows, regions, decays or a sink.
    """
    check_scheme(scheme)
    if more := _NOT_A_BIAS & scheme.hooks():
        raise NotImplementedError(
            f"score_mod adds a bias to a score, and {type(scheme).__name__} has more "
            f"({', '.join(sorted(more))}): use posenc_torch.attention"
        )
    given = Arguments(tokens=tokens, queries=queries).check()
    key = given.of_keys
    query = key if queries is None else queries
    check_pair("queries.pos", query.pos, "tokens.pos", key.pos)
    sides = (
        _check_features(scheme, "queries.features", query.features),
        _check_features(scheme, "tokens.features", key.features),
    )
    tensors = [*as_mapping(params).values(), *sides[0].values(), *sides[1].values()]
    here = _device_of([key.pos, *tensors], device)
    dtype = working_dtype(tensors, xp=xp)
    arrays = merge_constants(scheme, params, dtype=dtype, device=here, xp=xp)
    positions = _INDICES, _INDICES
    if query.pos is not None and key.pos is not None:
        positions = (
            _positions("queries.pos", query.pos, here), _positions("tokens.pos", key.pos, here)
        )  # fmt: skip
    query_features, key_features = (
        {name: a.to(dtype) if a.is_floating_point() else a for name, a in side.items()}
        for side in sides
    )
    mod = SchemeBias.of(scheme, arrays, dtype, positions, (query_features, key_features)).score_mod
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
            f"{type(scheme).__name__}: {error.args[0]}; give tokens and queries with "
            "features, which posenc.features computes"
        ) from None


def block_mask(
    q_len: int,
    k_len: int,
    *,
    causal: bool = False,
    window: int | Window | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The block mask for ``flex_attention``, with ``O((L / 128)**2)`` work and memory.

    Parameters
    ----------
    q_len, k_len
        Lengths of queries and keys. By default the last query is at the last key.
    causal, window, mask, tokens, queries
        As in ``posenc_torch.attention``; positions, segments and padding are read. A mask must not
        be an array.
    device
        Default: that of the given tensors, or torch's default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; the message has its name, its value and what is accepted.
    """
    q_len, k_len = check_count("q_len", q_len), check_count("k_len", k_len)
    whole = complete_mask(causal, window, mask)
    if whole.array is not None:
        raise ValueError("mask must not be an array here: take create_block_mask, or attention")
    inputs = block_mask_inputs(
        q_len, k_len, whole, tokens=tokens, queries=queries, device=device
    )  # fmt: skip
    # Without padding: callers read the number of blocks. One mask serves all heads.
    q_blocks, k_blocks = -(-q_len // BLOCK), -(-k_len // BLOCK)
    visible = (blocks[:, None, :q_blocks, :k_blocks] for blocks in inputs.visible_blocks())
    return inputs.block_mask(*visible)


def block_mask_inputs(
    q_len: int,
    k_len: int,
    mask: Mask,
    *,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    device: torch.device | str | None = None,
) -> BlockMaskInputs:
    """The arguments of ``block_mask``, checked and completed; ``mask`` is in normal form."""
    given = Arguments(tokens=tokens, queries=queries).check()
    given = Arguments(
        tokens=_masked_by(given.of_keys),
        queries=None if queries is None else _masked_by(given.of_queries),
    )
    facts = [a for side in (given.of_keys, given.of_queries) for a in vars(side).values()]
    here = _device_of(facts, device)
    batch = max([1, *[a.shape[0] for a in facts if getattr(a, "ndim", 1) == 2]])
    q, k = (torch.zeros(batch, 1, length, 1, device=here) for length in (q_len, k_len))
    query, key, aligned, _ = complete_sides(q, k, given, _NONE, xp)
    if aligned:
        positions = (
            TokenIntegers.of(query.pos, is_index=q_len == k_len),
            TokenIntegers.of(key.pos, is_index=True),
        )
    else:
        positions = TokenIntegers.of(query.pos), TokenIntegers.of(key.pos)
    q_seg, k_seg = (
        None if side.seg is None else TokenIntegers.of(side.seg) for side in (query, key)
    )
    return BlockMaskInputs(*positions, q_seg, k_seg, mask)


_NONE = NoPE()


def _masked_by(tokens: Tokens) -> Tokens:
    """What a mask reads of tokens."""
    return Tokens(tokens.pos, tokens.seg, exists=tokens.exists)


def _device_of(given: Sequence[Any], device: torch.device | str | None) -> Any:
    """``device``, or that of the first tensor, or torch's default."""
    tensors = [array for array in given if isinstance(array, Tensor)]
    return device or (tensors[0].device if tensors else torch.get_default_device())


_INDICES = TokenIntegers.of(torch.zeros(0, dtype=torch.int32), is_index=True)


def _positions(name: str, pos: Tensor, device: Any) -> TokenIntegers:
    return TokenIntegers.of(as_positions(name, pos, device=device, xp=xp))
