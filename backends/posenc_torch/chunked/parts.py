"""How a call is cut into parts, each one call of ``scaled_dot_product_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

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
    """

    mask: int = 128
    queries: int = 256
    scores: int = 2**22


_FEW_BLOCKS = 3  # of keys: to look which are negligible takes longer than to compute them

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


@torch.no_grad()
def parts(call: Call, bounds: Callable[[], Bounds | None] | None = None) -> Iterator[Part]:
    """Parts that together hold all visible pairs that are not negligible.

    ``bounds`` gives those of the call; default: they are computed here.
    """
    size, rows, scores = _sizes_for(call)
    heads, q_len, k_len = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    any_visible, all_visible = visible_blocks(call, size)
    kept = any_visible[:, None]
    if call.skip_blocks and bool((any_visible.sum(-1) > _FEW_BLOCKS).any()):
        known = Bounds.of(call) if bounds is None else bounds()
        kept = kept if known is None else kept & ~known.blocks(size, all_visible=all_visible)
    group = heads // call.k.shape[1]
    cost = _cost(call)
    by_pair = has_bias(call.scheme) and not has_bias_by_distance(call)
    by_pair = by_pair or has_channel_decay(call.scheme)
    chunks = _of_parts(kept.any(dim=0), rows // size)
    for n, spans in enumerate(_spans(chunks)):
        queries = slice(n * rows, min(q_len, (n + 1) * rows))
        for run, (first, last) in _runs(spans, heads, group, cost):
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


def _spans(kept: Tensor) -> list[list[tuple[int, int] | None]]:
    """The first and the last block, exclusive, that each part and head keeps; None for nothing."""
    numbers, count = kept.int(), kept.shape[2]
    ends = torch.stack([numbers.argmax(2), count - numbers.flip(2).argmax(2)], dim=2)
    ends = torch.where(kept.any(dim=2, keepdim=True), ends, -1)  # one transfer from a device
    return [
        [(first, last) if first >= 0 else None for first, last in heads]
        for heads in ends.transpose(0, 1).tolist()
    ]


def _runs(
    spans: Sequence[tuple[int, int] | None],
    heads: int,
    group: int,
    cost: Callable[[int, int], float],
) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Runs of heads, and their ranges of key blocks, that cost least; ``spans`` of each or of all.

    ``cost(count, blocks)`` is that of a part of so many heads. Heads that share keys make a run
    only with each other, unless all of them do.
    """
    if len(set(spans)) == 1:
        if spans[0] is not None:
            yield slice(0, heads), spans[0]
        return
    # The least cost of the heads before each one, and the run that ends there.
    least: list[float] = [0.0]
    ends: list[tuple[int, tuple[int, int] | None]] = []
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
                own = cost(end - start, blocks) if together is not None else 0.0
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
    yield from reversed(runs)


def _cost(call: Call) -> Callable[[int, int], float]:
    """What a part of some heads and blocks of keys takes, in blocks of one head.

    On a CPU the backward pass gives each head of a part to one thread. Another call takes about as
    long as a block.
    """
    batch: int = call.q.shape[0]
    threads = torch.get_num_threads() if call.q.device.type == "cpu" else 1

    def cost(heads: int, blocks: int) -> float:
        return threads * (1 + -(-batch * heads // threads) * blocks)

    return cost


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
    token = _sizes.set(BlockSizes(size, size))
    try:
        yield
    finally:
        _sizes.reset(token)
