"""What the parts of PyTorch's `chunked` hold."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
from frameworks_installed import require
from subjects import SUBJECTS, normal

import posenc
from posenc.apply.feature_needs import reads_hidden
from posenc.testing import assert_near
from posenc.testing.examples import HEAD_DIM, HEADS, HIDDEN_DIM
from posenc.testing.tolerances import attention_bound

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc_torch
from posenc_torch.chunked import job
from posenc_torch.chunked.parts import small_blocks

ALIBI = posenc.ALiBi(HEADS)
# One result each of two implementations: values, and gradients that add up as many keys.
TWO = 2 * attention_bound("float32", keys=600)


def tensor(*shape, seed=0):
    return torch.tensor(normal(shape, seed), dtype=torch.float32)


def pairs_of(monkeypatch, **options):
    """How many pairs of tokens the parts of a call hold for each head, and the keys of each."""
    counts = []

    def counted(call, bounds, cut=job.parts):
        ordered = cut(call, bounds)
        for part in ordered:
            heads, rows = (s.stop - s.start for s in part[:2])
            keys = sum(part.key_counts)
            counts.append((heads * rows * keys, keys))
        return ordered

    monkeypatch.setattr(job, "parts", counted)
    q = tensor(1, HEADS, 400, 8)
    with small_blocks(16):
        posenc_torch.attention(q, q, q, ALIBI, causal=True, implementation="chunked", **options)
    return sum(pairs for pairs, _ in counts) / HEADS, [keys for _, keys in counts]


def test_first_tokens_do_not_make_parts_longer(monkeypatch):
    alone, _ = pairs_of(monkeypatch, window=20, skip_blocks=False)
    with_first, _ = pairs_of(monkeypatch, mask=posenc.window(20, first=4), skip_blocks=False)
    assert with_first <= alone + 400 * 16  # one block of keys


def test_larger_parts_come_first(monkeypatch):
    """An allocator keeps the arrays of parts that grow: memory is then quadratic."""
    _, keys = pairs_of(monkeypatch, skip_blocks=False)
    assert keys == sorted(keys, reverse=True)
    assert keys[0] == 400
    assert keys[-1] < 40


@pytest.mark.parametrize("name", ["alibi", "t5", "nope", "fox"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": "function"},
        {"mask": "array"},
        {"segments": True},
        {"causal": False, "window": (9, 4)},
        {"bias": True, "return_lse": True},
    ],
    ids=str,
)
def test_first_tokens_beside_a_window(name, options):
    scheme = SUBJECTS[name]
    params = {n: torch.tensor(a) for n, a in posenc.init_params(scheme, seed=0).items()}
    q, k, v = (tensor(2, HEADS, 150, HEAD_DIM, seed=n) for n in range(3))
    given, tokens = {"causal": True, **options}, posenc.Tokens()
    mask = posenc.window(given.pop("window", 10), first=3)
    if given.get("mask") == "function":
        mask &= lambda i, j: (i + j) % 3 != 0
    if given.get("mask") == "array":
        mask &= tensor(2, 1, 150, 150, seed=5) > -1
    given["mask"] = mask
    if given.pop("segments", False):
        tokens = replace(tokens, seg=torch.arange(150).repeat(2, 1) // 60)
    if given.get("bias"):
        given["bias"] = tensor(1, HEADS, 150, 150, seed=6)
    if reads_hidden(scheme):
        tokens = replace(tokens, x=tensor(2, 150, HIDDEN_DIM, seed=7))
    given["tokens"] = tokens
    results = []
    for implementation in ("chunked", "reference"):
        leaves = [a.requires_grad_() for a in (q.clone(), k.clone(), v.clone())]
        with small_blocks(8):
            out = posenc_torch.attention(
                *leaves, scheme, params, implementation=implementation, **given
            )
            outs = out if isinstance(out, tuple) else (out,)
            results.append(
                (*(a.detach() for a in outs), *torch.autograd.grad(outs[0].square().sum(), leaves))
            )
    for got, want in zip(*results, strict=True):
        assert_near(got, want, TWO * max(1.0, want.abs().max().item()))


@pytest.mark.long
def test_memory_of_a_bias_by_pair_is_linear():
    """Resident memory, which counts what an allocator keeps, in a process of its own."""
    program = """
        import resource, sys, torch, posenc, posenc_torch
        length, scheme = int(sys.argv[1]), posenc.ALiBi(2)
        pos = torch.arange(length)
        q = torch.ones(1, 2, length, 8)
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before = peak()
        posenc_torch.attention(q, q, q, scheme, causal=True, implementation="chunked",
                               tokens=posenc.Tokens(places=pos[:, None]))
        print(peak() - before)
    """
    run = [sys.executable, "-c", textwrap.dedent(program)]
    short, long = (
        float(subprocess.run([*run, str(n)], check=True, capture_output=True, text=True).stdout)
        for n in (8192, 16384)
    )
    # Parts have at most 2**22 scores: 16 MiB a float32 array. Growing parts took 1100 MiB here.
    assert long < 32 * 16
    assert long < 4 * max(short, 64)
