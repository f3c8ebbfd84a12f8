"""Calls of attention drawn anew, one after another in one process, for a compiler that watches.

Whether torch's compiler can generate code for a CPU is seen in what a kernel captures: an array
whose size is a symbol, or a Python number that became one, ends in code that does not compile
(PyTorch 2.13). So hundreds of calls are tried without waiting for a C++ compiler.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from fuzzing import FOUR_HEADS, KINDS, Filling, Layout, fill
from roundings import SMALLEST, UNIT, bounds

import posenc_torch
from posenc import Tokens, window
from posenc.testing.framework import NumPy

NUMPY = NumPy()


def drawn(rng, kinds=tuple(KINDS), longest=400) -> tuple[Layout, Filling]:
    """Sizes, masks, positions, segments, a scale and a scheme, all anew."""

    def one_of(*values):
        return values[int(rng.integers(len(values)))]

    kind = one_of(*kinds)
    heads = 4 if kind in FOUR_HEADS else one_of(2, 4, 6)
    q_len = int(one_of(1, rng.integers(2, longest), rng.integers(2, longest)))
    k_len = int(one_of(q_len, q_len, rng.integers(1, longest)))
    given = ("L", "1L", "BL")
    width = int(rng.integers(1, 300))
    options = {
        "causal": bool(rng.integers(2)),
        "mask": window(
            one_of(None, width, (width, None), (2 * width, width // 3)),
            first=one_of(0, int(rng.integers(1, 30))),
        ),
        "softcap": one_of(None, float(rng.uniform(1, 4))),
        "scale": one_of(None, float(rng.uniform(0.1, 0.6))),
        "k_transformed": False,
    }
    dtype = one_of("int64", "int32", "int16")
    layout = Layout(
        kind=kind,
        batch=int(rng.integers(1, 6)),
        heads=heads,
        kv_heads=one_of(*[n for n in range(1, heads + 1) if heads % n == 0]),
        q_len=q_len,
        k_len=k_len,
        dim=(dim := one_of(8, 16)),
        v_dim=one_of(dim, 8),
        pos=one_of(*given) if q_len > k_len else one_of("", "", "", *given),
        pos_dtypes=(dtype, dtype),
        seg=one_of("", "", "", *given),
        exists=one_of(("", ""), ("", ""), (one_of("", *given), one_of("", *given))),
        shared=q_len <= k_len and bool(rng.integers(2)),
        options=tuple(sorted(options.items())),
    )
    filling = Filling(
        seed=int(rng.integers(2**16)),
        bases=(one_of(0, 7, 200, 2**12),),
        spread=one_of(20, 150, 400),
        ordered=bool(rng.integers(2)),
        factor=1,
        seg_base=0,
    )
    return layout, filling


def kind_of(layout: Layout) -> object:
    """What a kernel may be compiled for: all that is fixed in it, and whether a size is one.

    Lengths, batches, windows, first keys, scales, caps, positions and segments are not in it, nor
    ``causal``.
    """
    options = dict(layout.options)
    indexed = not layout.pos and layout.q_len == layout.k_len
    padding = layout.exists[1:] if layout.shared else layout.exists
    # A block mask a sequence.
    each = layout.batch > 1 and "BL" in (layout.pos, layout.seg, *padding)
    heads = layout.heads, layout.kv_heads, layout.dim, layout.v_dim
    ones = layout.batch == 1, layout.q_len == 1, layout.k_len == 1
    numbers = options["scale"] is None, options["softcap"] is None
    segments = bool(layout.seg or any(padding))  # padding is hidden by segments
    return layout.kind, heads, ones, indexed, each, segments, layout.batch > 4, numbers


def same(layout: Layout, **changes: object) -> Layout:
    """The layout with other fields or options."""
    options = dict(layout.options)
    fields = {n: v for n, v in changes.items() if n not in options}
    options |= {n: v for n, v in changes.items() if n in options}
    return replace(layout, **fields, options=tuple(sorted(options.items())))


def check(layout: Layout, filling: Filling, attend=posenc_torch.attention) -> None:
    """The call in float32, beside the reference in float64."""
    problem = fill(layout, filling)

    def given(array):
        floating = np.issubdtype(array.dtype, np.floating)
        return torch.tensor(array, dtype=torch.float32 if floating else None)

    tensors = {n: given(a) for n, a in problem.tensors.items()}
    params = {n: torch.tensor(a) for n, a in problem.params.items()}
    options = {n: o.map(given) if isinstance(o, Tokens) else o for n, o in problem.options.items()}
    with torch.no_grad():
        found = attend(
            **tensors, scheme=problem.scheme, params=params, implementation="flex", **options
        )
    expected = problem.attend(NUMPY, "reference", dtype="float64")
    dtypes = dict.fromkeys(problem.floats(), "float32")
    allowed = bounds(problem, np.zeros_like(expected), dtypes).values
    allowed = allowed + UNIT["float32"] * np.abs(expected) + SMALLEST["float32"]
    assert np.all(np.abs(found.numpy() - expected) <= allowed), layout


class Watched:
    """A compiler that generates nothing, counts, and looks at what kernels capture."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, examples):
        self.graphs += 1
        for node in graph.graph.nodes:
            if "flex_attention" in str(node.target):
                scale, captured = node.args[5], (*node.args[7], *node.args[8])
                assert type(scale) is float, f"a scale that is a symbol: {scale}"
                for array in captured:
                    value = array.meta["example_value"]
                    assert isinstance(value, torch.Tensor), f"a number is captured: {array}"
                    sizes = tuple(value.shape)
                    assert all(type(n) is int for n in sizes), f"a symbol in {array}: {sizes}"
        return graph.forward
