"""How a call is cut into parts, each one call of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from posenc.backend import (
    Bounds,
    Call,
    has_bias,
    has_bias_by_distance,
    has_channel_decay,
    visible_blocks,
)

WHY_NOT_COMPILED = (
    "posenc 'chunked' chooses its blocks one by one, often from tensor values, which a compiled "
    "graph does not have"
)


class BlockSizes(NamedTuple):
    """How finely a call is cut.

    Attributes
    ----------
    mask
        Queries and keys per block of the block mask and of what is negligible.
    queries
        Queries per part: fewer waste less on the diagonal, more make fewer calls.
    scores
        Scores per part where it holds a bias for each: an array of more than 32 MB is new memory
        each time, which takes a fifth of a training step.
    few
        Blocks of keys that a query may see without a look at which are negligible: it takes longer
        than to compute them.
    """

    mask: int = 128
    queries: int = 256
    scores: int = 2**22
    few: int = 8


Span: TypeAlias = tuple[int, int]
"""The first block of keys and the last, exclusive."""

_sizes: ContextVar[BlockSizes] = ContextVar("sizes", default=BlockSizes())  # noqa: B039


class Part(NamedTuple):
    """Heads, queries and keys of one call of ``scaled_dot_product_attention``.

    Attributes
    ----------
    heads, queries, keys
        Ranges of each.
    first
        An earlier range of keys: the first tokens, where a window is far from them. Or None.
    """

    heads: slice
    queries: slice
    keys: slice
    first: slice | None = None

    @property
    def ranges(self) -> tuple[slice, ...]:
        """The ranges of keys, in order."""
        return (self.keys,) if self.first is None else (self.first, self.keys)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """How many keys each range has."""
        return tuple(keys.stop - keys.start for keys in self.ranges)


def parts(call: Call, bounds: Callable[[], Bounds | None] | None = None) -> tuple[Part, ...]:
    """Parts that together hold all visible pairs that are not negligible, the largest first.

    Each then fits into the memory of the last. In the order of queries, under a causal mask, each
    is larger than all before it. ``bounds`` gives those of the call; default: they are computed
    here.
    """

    def cut() -> tuple[Part, ...]:
        return tuple(sorted(_parts(call, bounds), key=lambda part: -sum(part.key_counts)))

    if call.skip_blocks and sees_many_keys(call):
        return cut()
    (batch, heads, *_), kv_heads = call.q.shape, call.k.shape[1]
    return call.once(f"parts of {batch, heads, kv_heads}, {_sizes_for(call)}", cut)


@torch.no_grad()
def _parts(call: Call, bounds: Callable[[], Bounds | None] | None) -> Iterator[Part]:
    size, rows, scores, _ = _sizes_for(call)
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    any_visible, all_visible = _visible(call)
    kept = any_visible[:, None]
    if call.skip_blocks and sees_many_keys(call):
        known = Bounds.of(call) if bounds is None else bounds()
        kept = kept if known is None else kept & ~known.blocks(size, all_visible=all_visible)
    group = heads // call.k.shape[1]
    batch, threads = call.q.shape[0], _threads(call)
    by_pair = has_bias(call.scheme) and not has_bias_by_distance(call)
    by_pair = by_pair or has_channel_decay(call.scheme)
    chunks = _of_parts(kept.any(dim=0), rows // size)
    for n, spans in enumerate(_spans(chunks)):
        queries = slice(n * rows, min(q_len, (n + 1) * rows))
        for run, (first, last) in _runs(spans, heads, group, batch, threads):
            # What lies apart is the same for all heads.
            gap = _gap(chunks[:, n].any(dim=0), first, last) if _apart(call) else None
            end, start = gap or (first, first)
            part = Part(
                run, queries, slice(start * size, min(k_len, last * size)),
                slice(first * size, end * size) if gap else None,
            )  # fmt: skip
            of_head = call.q.shape[0] * rows * sum(part.key_counts)
            most = scores // of_head if by_pair else heads
            for few in _at_most(most, run, group):
                yield part._replace(heads=few)


def sees_many_keys(call: Call) -> bool:
    """Whether a look at which blocks are negligible pays."""
    few = _sizes.get().few
    many: bool = call.once(
        f"more than {few} blocks", lambda: bool((_visible(call)[0].sum(-1) > few).any())
    )
    return many


def _visible(call: Call) -> tuple[Tensor, Tensor]:
    size = _sizes_for(call).mask
    made: tuple[Tensor, Tensor] = call.once(
        f"visible blocks of {size}", lambda: visible_blocks(call, size)
    )
    return made


def _apart(call: Call) -> bool:
    """Whether a query may see the first keys and near ones, and none between."""
    return bool(call.mask.first_tokens or call.mask.parts)


def _gap(seen: Tensor, first: int, last: int) -> tuple[int, int] | None:
    """The first run of unseen blocks in ``first .. last - 1``, whose ends are seen; or None."""
    hidden = (~seen[first:last]).nonzero()
    if len(hidden) == 0:
        return None
    start = first + int(hidden[0])
    return start, start + int(seen[start:last].int().argmax())


def _sizes_for(call: Call) -> BlockSizes:
    """Half as many queries where a window is so short that it hides most pairs of a part."""
    sizes = _sizes.get()
    left, right = call.mask.offsets()
    if left is None or right is None or 2 * (left + right) > sizes.queries or sizes.mask < 2:
        return sizes
    return sizes._replace(mask=sizes.mask // 2, queries=sizes.queries // 2)


def _at_most(count: int, heads: slice, group: int) -> Iterator[slice]:
    """The heads in runs of about ``count``: of whole groups that share keys, or of one head."""
    whole = count >= heads.stop - heads.start
    step = heads.stop - heads.start if whole else max(1, count // group * group)
    for start in range(heads.start, heads.stop, step):
        yield slice(start, min(start + step, heads.stop))


def _of_parts(kept: Tensor, blocks: int) -> Tensor:
    """Blocks of keys that some query of a part keeps, from ``(H or 1, nq, nk)``."""
    missing = -kept.shape[1] % blocks
    whole = torch.nn.functional.pad(kept, (0, 0, 0, missing)) if missing else kept
    return whole.reshape(len(kept), -1, blocks, kept.shape[2]).any(dim=2)


def _spans(kept: Tensor) -> list[tuple[Span | None, ...]]:
    """The first and the last block, exclusive, that each part and head keeps; None for nothing."""
    numbers, count = kept.int(), kept.shape[2]
    ends = torch.stack([numbers.argmax(2), count - numbers.flip(2).argmax(2)], dim=2)
    ends = torch.where(kept.any(dim=2, keepdim=True), ends, -1)  # one transfer from a device
    return [
        tuple((first, last) if first >= 0 else None for first, last in heads)
        for heads in ends.transpose(0, 1).tolist()
    ]


@lru_cache(maxsize=512)  # calls of a model have the same spans
def _runs(
    spans: tuple[Span | None, ...], heads: int, group: int, batch: int, threads: int
) -> Sequence[tuple[slice, Span]]:
    """Runs of heads, and their ranges of key blocks, that cost least; ``spans`` of each or of all.

    Heads that share keys make a run only with each other, unless all of them do.
    """
    if len(set(spans)) == 1:
        return () if spans[0] is None else ((slice(0, heads), spans[0]),)
    # The least cost of the heads before each one, and the run that ends there.
    least: list[float] = [0.0]
    ends: list[tuple[int, Span | None]] = []
    for end in range(1, heads + 1):
        options = []
        together = spans[end - 1]
        for start in range(end - 1, -1, -1):
            span = spans[start]
            if (span is None) != (together is None):
                break
            if span is not None and together is not None:
                together = min(span[0], together[0]), max(span[1], together[1])
            if group == 1 or start // group == (end - 1) // group or end - start == heads:
                blocks = 0 if together is None else together[1] - together[0]
                own = 0.0
                if together is not None:
                    own = _cost(batch * (end - start), blocks, threads)
                options.append((least[start] + own, start, together))
        total, start, together = min(options, key=lambda option: option[0])
        least.append(total)
        ends.append((start, together))
    runs, end = [], heads
    while end > 0:
        start, together = ends[end - 1]
        if together is not None:
            runs.append((slice(start, end), together))
        end = start
    return tuple(reversed(runs))


def _cost(heads: int, blocks: int, threads: int) -> float:
    """What a part of some heads and blocks of keys takes, in blocks of one head.

    On a CPU the backward pass gives each head of a part to one thread. Another call takes about as
    long as a block.
    """
    return threads * (1 + -(-heads // threads) * blocks)


def _threads(call: Call) -> int:
    return torch.get_num_threads() if call.q.device.type == "cpu" else 1


def most_queries() -> int:
    """The most queries of a part."""
    return _sizes.get().queries


def fewest_tokens() -> int:
    """The fewest tokens for which a call of their own costs less than a part of another one."""
    return _sizes.get().mask // 2


def few_queries() -> int:
    """So few that the definition of some scores costs less than another anchor (decays)."""
    return max(1, _sizes.get().queries // 8)


@contextmanager
def small_blocks(size: int) -> Iterator[None]:
    """Blocks of ``size`` queries and keys instead of hundreds, so that short calls have several."""
    token = _sizes.set(BlockSizes(size, size, few=3))
    try:
        yield
    finally:
        _sizes.reset(token)
