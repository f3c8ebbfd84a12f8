"""The law of slices of heads, by which tensor parallelism is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import posenc
from posenc.contract.params import key_head_count
from posenc.schemes.head_slice import HeadSlice
from posenc.testing.framework import Host
from posenc.testing.law import law, require, require_equal
from posenc.testing.lawbook.attention import assert_attention_near, reference
from posenc.testing.scheme_case import SchemeCase

_LENGTH = 7


@law("scheme")
def a_slice_of_heads_is_that_of_the_whole(case: SchemeCase) -> None:
    """Heads alone (``HeadSlice``) have the params, bias and attention that they have in the whole.

    A scheme that declares ``mixes_heads`` is refused.
    """
    heads = case.heads
    if case.scheme.mixes_heads:
        try:
            HeadSlice(case.scheme, 0, 1, heads)
        except ValueError:
            return
        raise AssertionError("mixes_heads is declared, and HeadSlice takes the scheme")
    if heads == 1:
        return
    tensors = case.tensors(_LENGTH)
    whole = reference(case.call(tensors, causal=True))
    bias = case.call(tensors, causal=True).prepared().bias()
    for start, stop in ((0, 1), (1, heads)):
        part = HeadSlice(case.scheme, start, stop, heads)
        own, what, rows = (
            part.slice_params(case.params),
            f"heads {start} .. {stop - 1}",
            slice(start, stop),
        )
        first, all_first = posenc.init_params(part, 3), posenc.init_params(case.scheme, 3)
        for name, value in part.slice_params(all_first).items():
            require_equal(first[name], value, f"first values of {name} of {what}")
        call = replace(case, scheme=part, params=own).call(
            _of_heads(tensors, rows, rows), causal=True
        )
        assert_attention_near(reference(call), whole[:, rows], call, what)
        alone = call.prepared().bias()
        require(
            (alone is None) == (bias is None), f"bias of {what} is None, or not, unlike the whole"
        )
        if bias is not None and alone is not None:
            right = bias if bias.shape[1] == 1 else bias[:, rows]
            close = np.allclose(alone, right, rtol=1e-12, atol=1e-12)
            require(close, f"bias of {what} is not that of the whole")


@law("scheme")
def a_slice_of_heads_that_share_keys_is_that_of_the_whole(case: SchemeCase) -> None:
    """Query heads of a slice with the heads of keys that they read (GQA), as in the whole."""
    heads = case.heads
    declared = key_head_count(case.scheme)
    if case.scheme.mixes_heads or heads % 2 or not case.shares_keys or declared is not None:
        return
    tensors = case.tensors(_LENGTH, grouped=True)
    whole = reference(case.call(tensors))
    count = tensors["k"].shape[1]
    for start, stop in ((0, heads // 2), (heads - 1, heads)):
        part, rows = HeadSlice(case.scheme, start, stop, heads), slice(start, stop)
        own = replace(case, scheme=part, params=part.slice_params(case.params))
        call = own.call(_of_heads(tensors, rows, part.key_heads(count)))
        assert_attention_near(reference(call), whole[:, rows], call, f"heads {start} .. {stop - 1}")


def _of_heads(tensors: Mapping[str, Host], queries: slice, keys: slice) -> dict[str, Host]:
    """The vectors of some heads; hidden states are those of all."""
    rows = {"q": queries, "k": keys, "v": keys}
    return {n: a[:, rows[n]] if n in rows else a for n, a in tensors.items()}
