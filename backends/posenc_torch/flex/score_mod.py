"""A scheme's bias as FlexAttention takes it: a function of a score and four indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from posenc.backend import Call, PositionScheme, bias_by_distance, scheme_bias
from posenc_torch.flex import target
from posenc_torch.flex.block_mask import (
    BLOCK,
    TokenIntegers,
    capture,
    capture_pairs,
    capture_scalars,
    mark_static,
    own_memory,
    pad_to_blocks,
    row_index,
)
from posenc_torch.flex.copies import make_copies
from posenc_torch.flex.float_positions import is_same_in_float32
from posenc_torch.flex.params import fixed_reads, shared_params
from posenc_torch.flex.reads import HeadParams, TokenFeatures, load_scalar, number_name

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# Schemes by key, so that kernels read their numbers from here. Torch's compiler treats what it
# reaches from a global as constant. A number that comes with a call becomes a symbol (SymInt) when
# its value changes. Kernels for a CPU take no symbols.
_SCHEMES: dict[str, PositionScheme] = {}
_KEYS: dict[Any, str] = {}
_SAME_IN_FLOAT32: dict[Any, bool] = {}  # by scheme and names of arrays
_LOCK = Lock()  # a new key counts those there are, and a scheme's hash lets other threads run


def scheme_key(scheme: PositionScheme) -> str:
    """The key by which a kernel finds a scheme; equal schemes have equal keys."""
    with _LOCK:
        try:
            key = _KEYS.setdefault(scheme, str(len(_KEYS)))
        except TypeError:  # not hashable: it is only equal to itself
            key = _KEYS.setdefault(("id", id(scheme)), str(len(_KEYS)))
        _SCHEMES.setdefault(key, scheme)
    return key


def _scheme_or_key(scheme: PositionScheme) -> PositionScheme | str:
    """The key of a scheme; inside a larger graph the scheme, with constants for its integers."""
    return _with_constants(scheme) if torch.compiler.is_compiling() else scheme_key(scheme)


def _with_constants(scheme: PositionScheme) -> PositionScheme:
    """The scheme with integers that are constants to torch's compiler, which traces this function.

    Otherwise integers that differ between calls of one graph would become symbols.
    """
    if not hasattr(scheme, "__dict__"):
        return scheme
    same = object.__new__(type(scheme))
    for name, value in vars(scheme).items():
        object.__setattr__(same, name, _constant(value))
    return same


def _constant(value: Any) -> Any:
    """The value with constant integers: while it traces, the compiler evaluates ``len(range)``."""
    if isinstance(value, tuple):
        return tuple(_constant(v) for v in value)
    if isinstance(value, PositionScheme):
        return _with_constants(value)
    if type(value) is not int:
        return value
    return len(range(value)) if value >= 0 else -len(range(-value))


class SchemeBias(NamedTuple):
    """A scheme's bias, computed for each score inside the kernel.

    Attributes
    ----------
    scheme_or_key
        The scheme, or the key by which a kernel finds it.
    arrays
        Its learned params and constants.
    copied
        Names of the arrays that ``make_copies`` made.
    split
        Shapes, without heads, of learned arrays that are given as one array per index.
    dtype
        The working dtype.
    q, k
        Positions or places of queries and keys.
    query, key
        Features of queries and keys, as kernels capture them.
    float_positions
        Whether the bias gets positions in float32.
    """

    scheme_or_key: PositionScheme | str
    arrays: Mapping[str, Tensor]
    copied: Sequence[str]
    split: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    q: TokenIntegers
    k: TokenIntegers
    query: Mapping[str, Tensor]
    key: Mapping[str, Tensor]
    float_positions: bool = False

    @classmethod
    def of(
        cls,
        scheme: PositionScheme,
        arrays: Mapping[str, Tensor],
        dtype: torch.dtype,
        tokens: tuple[TokenIntegers, TokenIntegers],
        features: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {}),
        *,
        batch: int | None = None,
        copied: Sequence[str] = (),
    ) -> SchemeBias:
        """From the parts of a call; ``tokens`` are positions or places of queries and keys.

        Kernels load ``copied`` arrays from copies of their present values.
        """
        captured = _capture_features(features, batch)
        arrays, split = _split_arrays(scheme, arrays, features)
        copied = [name for name in copied if name not in split]
        arrays = {n: make_copies(a) if n in copied else a for n, a in arrays.items()}
        arrays = _mark_sizes(arrays)
        return cls(_scheme_or_key(scheme), arrays, copied, split, dtype, *tokens, *captured)

    @property
    def scheme(self) -> PositionScheme:
        """The scheme of the bias."""
        key = self.scheme_or_key
        return _SCHEMES[key] if isinstance(key, str) else key

    @property
    def gathers(self) -> bool:
        """Whether kernels gather: different scores may load different values."""
        tables = (*self.query.values(), *self.key.values())
        own = shared_params(self.scheme)
        return any(a.ndim == 4 and a.is_floating_point() for a in tables) or any(
            a.ndim - (name in self.copied) > 1 and name not in own
            for name, a in self.arrays.items()
        )

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        q, k = self.q.at(b, i), self.k.at(b, j)
        if self.float_positions:
            q, k = q.to(torch.float32), k.to(torch.float32)
        bias = self._bias(q, k, b, h, i, j)
        if bias is None:
            return score
        biased: Tensor = score.to(_score_dtype(score)) + bias.to(_score_dtype(score))
        return biased

    def _bias(
        self, q: Tensor, k: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor
    ) -> Tensor | None:
        """The bias of head ``h`` at positions ``q`` and ``k``, those of tokens ``i`` and ``j``."""
        scheme = self.scheme
        query = TokenFeatures(self.query, "query", b, h, i)
        key = TokenFeatures(self.key, "key", b, h, j)
        shared = shared_params(scheme)
        arrays, copied, split = self.arrays, self.copied, self.split
        params = HeadParams(arrays, shared, copied, split, h, self.dtype, query, key)
        return scheme_bias(scheme, q, k, params, xp=xp)

    def with_float_positions(self) -> SchemeBias:
        """The bias with positions in float32, if it is the same function of them."""
        key = self.scheme_or_key, self.dtype, *self.arrays, *self.query, *self.key
        if key not in _SAME_IN_FLOAT32:
            with _disable_current_modes():  # values do not matter, also if there are none
                arrays, query, feature = map(_zeros_like, (self.arrays, self.query, self.key))
                like = self._replace(arrays=arrays, query=query, key=feature)
                index = torch.zeros(1, dtype=torch.int64, device="cpu")
                _SAME_IN_FLOAT32[key] = is_same_in_float32(
                    lambda q, k: like._bias(q, k, *[index] * 4), index.to(torch.int32)
                )
        return self._replace(float_positions=_SAME_IN_FLOAT32[key])


def _split_arrays(
    scheme: PositionScheme,
    arrays: Mapping[str, Tensor],
    features: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> tuple[Mapping[str, Tensor], dict[str, tuple[int, ...]]]:
    """The arrays, with one per-head array for each number of a learned one in ``fixed_reads``.

    Also the shapes of the arrays that are replaced. Kernels get no copies of them: a row of copies
    of each number would not fit in registers.
    """
    learns = torch.is_grad_enabled() and any(a.requires_grad for a in arrays.values())
    fixed = fixed_reads(scheme, arrays, *features) if learns else {}
    fixed = {name: indices for name, indices in fixed.items() if arrays[name].requires_grad}
    if not fixed:
        return arrays, {}
    shared = shared_params(scheme)
    heads = max((a.shape[0] for name, a in arrays.items() if name not in shared), default=1)
    kept = {name: a for name, a in arrays.items() if name not in fixed}
    shapes = {}
    for name, indices in fixed.items():
        whole: Any = arrays[name]
        whole = whole.expand(heads, *whole.shape) if name in shared else whole
        shapes[name] = tuple(whole.shape[1:])
        kept |= {number_name(name, index): whole[:, *index] for index in indices}
    return kept, shapes


class DistanceBias(NamedTuple):
    """A bias read from a table of its values at every distance ``q_pos - k_pos``.

    Attributes
    ----------
    table
        ``(H, n)`` or ``(1, n)``, with one more block before and after: kernels load before they
        mask. Inside a larger graph for a GPU ``(H or 1, sides, K)``: by the amount of a distance,
        and by whether the key is later, unless the call is causal.
    offset
        The column of ``i - j = 0``, a tensor. None if it is ``BLOCK`` at every length. By amount:
        the position of the first query, or None if it is 0.
    """

    table: Tensor
    offset: Tensor | None

    @property
    def gathers(self) -> bool:
        """Whether kernels gather: different scores may load different values."""
        return True

    @classmethod
    def of(cls, call: Call, by_distance: Tensor) -> DistanceBias:
        """From the bias at the distances ``1 - K .. Q - 1`` of ``k_pos - q_pos``."""
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        back = by_distance.flip(-1)
        ahead = q_len - 1  # the number of distances to later keys
        if call.causal:
            back, ahead = back[:, ahead:], 0
        table = torch.nn.functional.pad(back, (BLOCK, BLOCK))
        # On a GPU this is compiled by itself, and is no larger graph.
        table = capture(table) if target.is_cpu(table) else pad_to_blocks(table, 1)
        if call.causal and q_len == k_len:
            return cls(table, None)
        # The first query is at position K - Q.
        return cls(table, capture(call.query.pos[:1] + (BLOCK + ahead)))

    @classmethod
    def by_amount(cls, call: Call) -> DistanceBias | None:
        """For a larger graph on a GPU; None if there is no bias by distance.

        A size that is a formula, such as ``Q + K - 1``, would have no gradient there.
        """
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        call = replace(call, extra_bias=None)
        earlier = bias_by_distance(call, between=(1 - k_len, 0))
        if earlier is None:
            return None
        sides = [earlier.flip(-1)]
        if not call.causal:
            sides.append(bias_by_distance(call, between=(0, k_len - 1)))
        first = None if q_len == k_len else capture(call.query.pos[:1])
        return cls(own_memory(torch.stack(sides, dim=1)), first)

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        head = row_index(self.table, 0, h)
        if self.table.ndim == 3:
            back = i - j if self.offset is None else i - j + load_scalar(self.offset, h)
            side = row_index(self.table, 1, (back < 0).to(h.dtype))
            bias = self.table[head, side, torch.abs(back)]
        else:
            offset = BLOCK if self.offset is None else load_scalar(self.offset, h)
            bias = self.table[head, i - j + offset]
        return score.to(_score_dtype(score)) + bias.to(_score_dtype(score))


class ScoreSteps(NamedTuple):
    """The steps on a score that FlexAttention does not do itself: scale, softcap and both biases.

    Attributes
    ----------
    scale, cap
        From ``capture_scalars``, or None.
    bias
        The scheme's bias, or None.
    extra_bias
        The caller's bias ``(B or 1, H or 1, Q, K)`` after ``capture_pairs``, or None.
    """

    scale: Tensor | None
    cap: Tensor | None
    bias: SchemeBias | DistanceBias | None
    extra_bias: Tensor | None

    @property
    def gathers(self) -> bool:
        """Whether kernels gather: different scores may load different values."""
        return self.extra_bias is not None or (self.bias is not None and self.bias.gathers)

    @classmethod
    def of(cls, call: Call, bias: SchemeBias | DistanceBias | None, *, scaled: bool) -> ScoreSteps:
        """From a call; ``scaled`` is whether FlexAttention already scales the scores."""

        def scalar(value: float | None) -> Tensor | None:
            if value is None:
                return None
            return capture_scalars(value, dtype=torch.float32, device=call.q.device)

        scale, cap = scalar(None if scaled else call.scale), scalar(call.softcap)
        return cls(
            scale, cap, bias, None if call.extra_bias is None else capture_pairs(call.extra_bias)
        )

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score, scaled and capped, with the bias of head ``h`` and the caller's added."""
        score = score.to(_score_dtype(score))
        if self.scale is not None:
            score = score * load_scalar(self.scale, h)
        if self.cap is not None:
            cap = load_scalar(self.cap, h)
            score = cap * torch.tanh(score / cap)
        if self.bias is not None:
            score = self.bias.score_mod(score, b, h, i, j)
        if self.extra_bias is not None:
            row, head = row_index(self.extra_bias, 0, b), row_index(self.extra_bias, 1, h)
            score = score + self.extra_bias[row, head, i, j]
        return score


def _zeros_like(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros on a CPU in the place of arrays, in the memory of one."""
    return {
        name: torch.zeros((), dtype=a.dtype, device="cpu").expand(tuple(map(int, a.shape)))
        for name, a in arrays.items()
    }


def _capture_features(
    sides: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], batch: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Features of both sides as a kernel captures them.

    Features of queries are copies, even if keys have the same tensor, because the backward pass
    allows one load of each.
    """
    query, key = (
        {name: _capture_feature(array, batch) for name, array in side.items()} for side in sides
    )
    copies = {name: own_memory(array.clone()) for name, array in query.items()}
    # clone() drops the marks of mark_static.
    return {n: mark_static(a) if target.is_cpu(a) else a for n, a in copies.items()}, key


def _capture_feature(array: Tensor, batch: int | None) -> Tensor:
    """A feature as a kernel captures it; on a CPU with ``batch`` rows, if given."""
    if target.is_cpu(array):
        if not array.dtype.is_floating_point:  # places: one kernel for all integer dtypes
            array = array.to(torch.int32)
        if batch is not None:
            array = array.expand(batch, *array.shape[1:])
    return capture(array, rows=array.shape[0] != 1 or batch is not None, axis=2)


def _mark_sizes(arrays: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Constants and params of a scheme; on a CPU with sizes that are constants to the compiler.

    They are copies, so the caller's tensors get no marks. Inside a larger graph, a kernel for a CPU
    captures only tensors that own their memory, which ``capture`` makes (PyTorch 2.13).
    """
    if not any(target.is_cpu(a) for a in arrays.values()):
        return {n: own_memory(a) for n, a in arrays.items()}
    if not torch.compiler.is_compiling():
        return {n: mark_static(a.clone()) for n, a in arrays.items()}
    sized = {n: mark_static(a) for n, a in arrays.items()}
    return {n: capture(a)[..., : a.shape[-1]] if a.ndim else a for n, a in sized.items()}


def _score_dtype(score: Tensor) -> torch.dtype:
    """At least float32: a score is traced in q's dtype, and half precision cannot hold a bias."""
    return torch.promote_types(score.dtype, torch.float32)
