"""Masks of callers, and their combinations, in every implementation."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import compiles
from frameworks import ROUTES, route
from sample import long
from subjects import HEADS, normal

import posenc
from posenc import Mask, Tokens, causal, window
from posenc.attn.masks import Blocks, complete_mask
from posenc.schemes import Sink
from posenc.testing import AttentionCase
from posenc.testing.tolerances import ATTENTION_TOL, assert_near

NUMPY = route("numpy", "reference")
LENGTH = 24
POS = np.arange(LENGTH)


@dataclass(frozen=True)
class Dilated(Mask):
    """Every ``step``-th key; it does not tell which blocks it shows."""

    step: int

    def pairs(self, q, k, xp):
        return (q.pos - k.pos) % self.step == 0


@dataclass(frozen=True)
class Prefix(Mask):
    """Keys before ``size`` see each other; later ones are seen causally (prefix language model)."""

    size: int

    def pairs(self, q, k, xp):
        return (k.pos < self.size) | (k.pos <= q.pos)

    def blocks(self, q, k):
        some = (k.low < self.size) | (k.low <= q.high)
        return some, (k.high < self.size) | (k.high <= q.low)


@dataclass(frozen=True)
class Blockwise(Mask):
    """A query sees its own block of ``size`` tokens."""

    size: int

    def pairs(self, q, k, xp):
        return q.pos // self.size == k.pos // self.size

    def blocks(self, q, k):
        first, last = q.low // self.size, q.high // self.size
        others = k.low // self.size, k.high // self.size
        some = (first <= others[1]) & (others[0] <= last)
        return some, (first == others[1]) & (others[0] == last)


def seen(q, k):
    """By hand, for the cases below: ``(Q, K)`` positions as a column and a row."""
    near = (q - k <= 3) & (k - q <= 3)
    return {
        "dilated": (q - k) % 3 == 0,
        "prefix": (k < 5) | (k <= q),
        "blockwise": q // 6 == k // 6,
        "causal": k <= q,
        "window": near,
        "first": near | ((k >= 0) & (k < 2)),
        "function": (q + k) % 2 == 0,
    }


OWN = {
    "dilated": Dilated(3),
    "prefix": Prefix(5),
    "blockwise": Blockwise(6),
    "causal": causal,
    "window": window(4),
    "first": window(4, first=2),
    "function": Mask(function=lambda q, k: (q + k) % 2 == 0),
}
CASES = ["dilated", "prefix", "causal blockwise", "first window", "causal first function prefix"]


def combined(names):
    whole = Mask()
    for name in names.split():
        whole = whole & OWN[name]
    return whole


WAITING = [p.values[0] for p in ROUTES if p.values[0] is not None and compiles(p.values[0])]
# Where each call waits for a compiler, two combinations.
FEW = [("jax-chunked", "causal blockwise"), ("torch-flex", "causal first function prefix")]


@pytest.mark.parametrize(
    ("names", "route"),
    [
        pytest.param(
            names, *p.values, id=f"{names}-{p.id}",
            marks=(*p.marks, *[long] * (p.values[0] in WAITING and (p.id, names) not in FEW)),
        )
        for names in CASES
        for p in ROUTES
    ],
)  # fmt: skip
def test_combined_masks_hide_what_each_hides(route, names):
    scheme = posenc.ALiBi(HEADS)
    tensors = {n: normal((2, HEADS, LENGTH, 8), seed) for seed, n in enumerate("qkv")}
    shuffled = np.random.default_rng(3).permutation(LENGTH)
    for pos in (POS, shuffled):
        by_hand = seen(pos[:, None], pos[None, :])
        visible = np.all([by_hand[name] for name in names.split()], axis=0)
        tokens = Tokens() if pos is POS else Tokens(pos)
        own = AttentionCase(scheme, tensors, options={"mask": combined(names), "tokens": tokens})
        as_array = AttentionCase(
            scheme, tensors, options={"mask": visible[None, None], "tokens": tokens}
        )
        expected = as_array.attend(NUMPY.framework, "reference", dtype="float64")
        try:
            found = own.attend_eagerly(route.framework, route.implementation)
        except NotImplementedError as error:
            why = str(error)
            found = expected if "mask" in why or "window" in why else None
        assert_near(found, expected, ATTENTION_TOL["float32"])


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(*p.values, id=p.id, marks=(*p.marks, *[long] * (p.values[0] in WAITING)))
        for p in ROUTES
    ],
)
def test_a_mask_of_queries_alone_beside_a_sink(route):
    """Its pairs have one column, and the key of a sink is another one."""
    scheme = Sink(posenc.NoPE(), learned=False, value=0.5)
    tensors = {n: normal((2, HEADS, LENGTH, 8), seed) for seed, n in enumerate("qkv")}
    visible = np.broadcast_to(np.arange(LENGTH)[:, None] % 3 != 0, (1, 1, LENGTH, LENGTH))
    by_function = AttentionCase(scheme, tensors, options={"mask": lambda q, k: q % 3 != 0})
    as_array = AttentionCase(scheme, tensors, options={"mask": visible})
    expected = as_array.attend(NUMPY.framework, "reference", dtype="float64")
    try:
        found = by_function.attend_eagerly(route.framework, route.implementation)
    except NotImplementedError as error:
        why = str(error)
        found = expected if "mask" in why or "sink" in why else None
    assert_near(found, expected, ATTENTION_TOL["float32"])


def test_the_parts_of_a_mask():
    both = causal & window(512, first=4)
    assert (both.causal, both.window, both.first_tokens) == (True, (511, 511), 4)
    assert (window(5) & window((2, None))).window == (2, 4)
    assert both & Mask() == both
    assert causal & Dilated(2) == causal & Dilated(2) != causal & Dilated(3)
    assert (Dilated(2) & Prefix(3)).parts == (Dilated(2), Prefix(3))
    array = np.eye(3, dtype=bool)[None, None]
    assert np.array_equal((array & causal).array, (causal & array).array)
    assert (both.offsets(), causal.offsets(), window(3).offsets()) == (
        (None, 0), (None, 0), (2, 2)
    )  # fmt: skip


def test_short_forms_are_masks():
    assert complete_mask(True, 5, None) == causal & window(5)
    function = OWN["function"].function
    assert complete_mask(False, None, function) == complete_mask(False, None, OWN["function"])


@pytest.mark.parametrize("own", [Prefix(7), Blockwise(6), causal & window(4, first=2)], ids=str)
def test_blocks_agree_with_pairs(own):
    """``some`` is False only without a visible pair, ``every`` True only if all are visible."""
    rng = np.random.default_rng(5)
    for size in (2, 5):
        pos = rng.integers(0, 40, (2, 20))
        pos = np.sort(pos, axis=-1) if size == 2 else pos
        q, k = (Tokens(p) for p in (pos[0][:, None], pos[1][None, :]))
        pairs = own.pairs(q, k, np)
        blocks = [p.reshape(-1, size) for p in pos]
        low, high = ([b.min(-1) for b in blocks], [b.max(-1) for b in blocks])
        some, every = own.blocks(
            Blocks(low[0][:, None], high[0][:, None]), Blocks(low[1][None], high[1][None])
        )
        tiles = pairs.reshape(20 // size, size, 20 // size, size).swapaxes(1, 2)
        assert not np.any(tiles.any((2, 3)) & ~np.broadcast_to(some, tiles.shape[:2]))
        assert not np.any(~tiles.all((2, 3)) & np.broadcast_to(every, tiles.shape[:2]))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (lambda q, k: q - k, TypeError, "mask must return booleans"),
        (lambda q: q > 0, ValueError, "function of 1 arguments"),
        (Mask(left=-1), ValueError, "window must be at least 0, got -1"),
        (Mask(first_tokens=1.5), TypeError, "first_tokens"),
        (Mask(causal=1), TypeError, "causal"),
        (np.ones((1, 1, 2, 3), bool), ValueError, "mask must be"),
    ],
)
def test_wrong_masks(mask, error, message):
    x = np.ones((1, 2, 4, 8))
    with pytest.raises(error, match=message):
        posenc.attention(x, x, x, posenc.NoPE(), mask=mask)


def test_a_mask_of_ones_own_is_a_dataclass():
    class Plain(Mask):
        def __init__(self, step):
            object.__setattr__(self, "step", step)
            super().__init__()

        def pairs(self, q, k, xp):
            return (q.pos - k.pos) % self.step == 0

    x = np.ones((1, 2, 4, 8))
    with pytest.raises(TypeError, match="Plain must be a frozen dataclass"):
        posenc.attention(x, x, x, posenc.NoPE(), mask=Plain(2))


class Near(Mask):
    def pairs(self, q, k, xp):
        return abs(q.pos - k.pos) < self.width


@pytest.mark.parametrize("compared", ["by its base", "but one field", "whole"])
def test_masks_of_ones_own_that_differ_are_not_equal(compared):
    """Compiled programs are found by the mask: two that are equal would share one."""
    width = field(default=3, compare=compared != "but one field")
    plain = type("Own", (Near,), {"__annotations__": {"width": int}, "width": width})
    kind = dataclass(frozen=True, eq=compared != "by its base")(plain)
    x = np.ones((1, 2, 4, 8))
    if compared == "whole":
        posenc.attention(x, x, x, posenc.NoPE(), mask=kind(width=2))
        return
    with pytest.raises(TypeError, match="two Own that differ in 'width' alone are equal"):
        posenc.attention(x, x, x, posenc.NoPE(), mask=kind(width=2))
