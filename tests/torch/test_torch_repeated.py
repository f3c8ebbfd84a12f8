"""A call that repeats others gives their result, and keeps nothing that may change."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from dataclasses import dataclass

import pytest
from frameworks import HAS
from hypothesis import given
from hypothesis import strategies as st
from subjects import HEAD_DIM, SUBJECTS

import posenc
from posenc.backend import Arguments, Hook, has_features, may_warn, reads_hidden
from posenc.testing import SchemeCase

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

import posenc_torch
from posenc_torch import repeated

UNLEARNED = [n for n, s in SUBJECTS.items() if not s.param_specs() and not reads_hidden(s)]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(repeated, "_kept", {})


def vectors(scheme, q_len=5, k_len=9, batch=2, dtype=torch.float32, seed=0):
    case, draw = SchemeCase(scheme), torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, case.heads, n, case.head_dim, generator=draw, dtype=dtype)
        for n in (q_len, k_len, k_len)
    ]


def results(arrays, scheme, grad, **options):
    """The result, and the gradients of the vectors."""
    leaves = [a.clone().requires_grad_(grad) for a in arrays]
    out = posenc_torch.attention(*leaves, scheme, causal=True, **options)
    if not grad:
        return [out]
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def kept():
    return [each for each in repeated._kept.values() if each.run is not None]


@pytest.mark.parametrize("name", UNLEARNED)
@given(
    length=st.sampled_from([1, 5, 9, 40]),
    grad=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    window=st.sampled_from([None, 3]),
    skip=st.booleans(),
    implementation=st.sampled_from(["auto", "chunked"]),
)
def test_every_repetition_has_the_bits_of_the_first(
    name, length, grad, dtype, window, skip, implementation
):
    repeated._kept.clear()
    scheme = SUBJECTS[name]
    options = {"window": window, "skip_blocks": skip, "implementation": implementation}
    arrays = [vectors(scheme, length, max(9, length), dtype=dtype, seed=n) for n in range(4)]
    alone = []
    for each in arrays:
        repeated._kept.clear()
        alone.append(results(each, scheme, grad, **options))
    repeated._kept.clear()
    for each, expected in zip(arrays, alone, strict=True):
        for one, other in zip(results(each, scheme, grad, **options), expected, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype


def test_calls_of_the_same_kind_share_a_function_from_the_second_on():
    arrays = vectors(posenc.ALiBi(4))
    for count in (0, 1, 1):
        results(arrays, posenc.ALiBi(4), grad=False)
        assert len(kept()) == count


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_have_their_own(context):
    """A training step cannot use what inference made."""
    scheme, arrays = posenc.ALiBi(4), vectors(posenc.ALiBi(4))
    expected = results(arrays, scheme, grad=True)
    leaves = [a.clone().requires_grad_() for a in arrays]
    with context():
        for _ in range(3):
            posenc_torch.attention(*leaves, scheme, causal=True)
    for _ in range(3):
        for one, other in zip(results(arrays, scheme, grad=True), expected, strict=True):
            assert torch.equal(one, other)


def test_autocast_has_its_own():
    scheme, arrays = posenc.ALiBi(4), vectors(posenc.ALiBi(4))
    options = {"grad": False, "implementation": "reference"}
    with torch.autocast("cpu"):
        expected = results(arrays, scheme, **options)[0]
    repeated._kept.clear()
    for _ in range(3):
        results(arrays, scheme, **options)
    for _ in range(3):
        with torch.autocast("cpu"):
            assert torch.equal(results(arrays, scheme, **options)[0], expected)


@pytest.mark.parametrize(
    "wrong",
    [{"causal": 1}, {"skip_blocks": 1}, {"scale": True}, {"window": True}, {"k_transformed": 0}],
    ids=str,
)
def test_what_equals_an_accepted_value_stays_an_error(wrong):
    arrays = vectors(posenc.ALiBi(4))
    right = {"causal": True, "skip_blocks": True, "scale": 1.0, "window": 1}
    for _ in range(3):
        posenc_torch.attention(*arrays, posenc.ALiBi(4), **right)
    with pytest.raises(TypeError, match=next(iter(wrong))):
        posenc_torch.attention(*arrays, posenc.ALiBi(4), **{**right, **wrong})


def test_every_call_warns_of_its_own():
    arrays = vectors(posenc.NoPE())
    for _ in range(4):
        with pytest.warns(posenc.SchemeWarning, match="embeddings only"):
            posenc_torch.attention(*arrays, posenc.Sinusoidal(HEAD_DIM), causal=True)


class Mutable(posenc.PositionScheme):
    """A scheme that is equal to itself after a change."""

    def __init__(self):
        self.slope = torch.ones(())

    def bias(self, q_pos, k_pos, *, params, xp):
        return self.slope * xp.astype(k_pos - q_pos, xp.float32)


@dataclass(frozen=True)
class Holds(Mutable):
    """A field that is equal to itself after a change."""

    slope: torch.Tensor


class Scaled(posenc.ALiBi):
    """A factor that no comparison sees."""

    def __init__(self, factor):
        super().__init__(4)
        object.__setattr__(self, "slope", torch.tensor(factor))

    def bias(self, q_pos, k_pos, *, params, xp):
        return self.slope * super().bias(q_pos, k_pos, params=params, xp=xp)


@pytest.mark.parametrize(
    "make",
    [Mutable, lambda: Holds(torch.ones(())), lambda: Scaled(1.0)],
    ids=["own", "field", "sub"],
)
@pytest.mark.parametrize("inside", [False, True])
def test_a_scheme_that_may_change_is_not_kept(make, inside):
    scheme, arrays = make(), vectors(posenc.ALiBi(4))
    whole = posenc.schemes.Sum(posenc.NoPE(), scheme) if inside else scheme
    first = [results(arrays, whole, grad=False)[0] for _ in range(3)]
    scheme.slope.fill_(2.0)
    assert not torch.equal(results(arrays, whole, grad=False)[0], first[0])
    assert not kept()


def test_most_of_the_catalogue_is_kept():
    """All that learns nothing and reads no features."""
    for name in UNLEARNED:
        scheme = SUBJECTS[name]
        repeated._kept.clear()
        for _ in range(2):
            results(vectors(scheme, 16, 16), scheme, grad=False, implementation="chunked")
        of_vectors = has_features(scheme) or scheme.key_paths or scheme.hooks() & {Hook.REGIONS}
        warns = may_warn(scheme, True, Arguments())
        assert len(kept()) == (not of_vectors and not warns), name


def test_a_cache_without_positions_warns_each_time():
    arrays = vectors(posenc.RoPE(HEAD_DIM))
    for _ in range(4):
        with pytest.warns(posenc.SchemeWarning, match="holds all keys from position 0"):
            posenc_torch.attention(*arrays, posenc.RoPE(HEAD_DIM), causal=True, k_transformed=True)


@pytest.mark.parametrize("also", ["params", "tokens", "mask", "bias"])
def test_what_the_caller_may_change_is_not_kept(also):
    scheme = posenc.T5Bias(4) if also == "params" else posenc.ALiBi(4)
    q, k, v = vectors(scheme)
    pairs = torch.zeros(1, 1, 5, 9)
    given = {
        "params": {n: torch.tensor(a) for n, a in posenc.init_params(scheme).items()},
        "tokens": posenc.Tokens(pos=torch.arange(9)),
        "mask": pairs == 0,
        "bias": pairs,
    }[also]
    for _ in range(3):
        before = posenc_torch.attention(q, k, v, scheme, causal=True, **{also: given})
    assert not kept()
    if also == "params":
        next(iter(given.values())).mul_(2).add_(torch.arange(4)[:, None])
    elif also == "tokens":
        given.pos[0] = -5
    elif also == "mask":
        given[..., :3] = False
    else:
        given[..., :3] = 2.0
    after = posenc_torch.attention(q, k, v, scheme, causal=True, **{also: given})
    assert not torch.equal(before, after)


def test_only_some_are_kept_and_the_latest(monkeypatch):
    monkeypatch.setattr(repeated, "LIMIT", 40_000)
    scheme = posenc.ALiBi(4)
    for length in range(10, 40):
        arrays = vectors(scheme, length, length)
        for _ in range(3):
            results(arrays, scheme, grad=False)
        assert sum(each.numbers for each in repeated._kept.values()) <= 40_000
    found = [kind[0][0][2] for kind, each in repeated._kept.items() if each.run is not None]
    assert found
    assert found == list(range(40 - len(found), 40))
    for length in range(200, 300):
        results(vectors(scheme, 1, length), scheme, grad=False)
    assert len(repeated._kept) <= 64
    large = vectors(scheme, 100, 100)  # 2 * 4 * 100 * 100 numbers
    for _ in range(3):
        results(large, scheme, grad=False)
    assert all(kind[0][0][2] != 100 for kind, each in repeated._kept.items() if each.run)


def test_no_vectors_are_kept():
    """Whatever the implementation, with masks that depend on them and others."""
    for scheme, length, learns in (
        (posenc.ALiBi(4, slopes=(2.0, 2.0, 2.0, 2.0)), 70, True),
        (posenc.ALiBi(4), 9, False),
        (posenc.RoPE(HEAD_DIM), 9, True),
        (posenc.NoPE(), 9, False),
    ):
        for implementation in ("sdpa", "chunked", "reference"):
            arrays = vectors(scheme, length, length)
            alive = [weakref.ref(a) for a in arrays]
            for a in arrays:
                a.requires_grad_(learns)
            for _ in range(3):
                posenc_torch.attention(*arrays, scheme, causal=True, implementation=implementation)
            del arrays, a
            assert not any(each() is not None for each in alive)


@pytest.mark.parametrize("implementation", ["sdpa", "chunked"])
def test_masks_of_training_follow_the_vectors(implementation):
    """Where they decide which keys are negligible, a later call may need more keys."""
    scheme = posenc.ALiBi(1, slopes=(2.0,))
    small = [0.1 * a for a in vectors(posenc.ALiBi(1), 90, 90, batch=1)]
    q, k, v = (torch.zeros(1, 1, 90, 8) for _ in range(3))
    q[..., -1, 0], k[..., 0, 0], v[..., 0, :] = 100.0, 100.0, 1.0  # a far key that answers
    for _ in range(3):
        results([a[..., :8] for a in small], scheme, grad=True, implementation=implementation)
    assert kept()
    found = results([q, k, v], scheme, grad=True, implementation=implementation)[0]
    torch.testing.assert_close(found[0, 0, -1], torch.ones(8))


def test_masks_of_training_come_to_an_end():
    """A kind of call keeps those of two depths, however much its vectors change."""
    scheme, (q, k, v) = (
        posenc.ALiBi(4, slopes=(2.0, 1.0, 2.0, 1.0)),
        vectors(posenc.ALiBi(4), 90, 90),
    )
    for implementation in ("sdpa", "chunked"):
        repeated._kept.clear()
        held = []
        for n in range(12):
            factor = 1 + n / 4
            results([q * factor, k, v], scheme, grad=True, implementation=implementation)
            held.append(sum(a.numel() for a in gc.get_objects() if type(a) is torch.Tensor))
        assert max(held[6:]) <= max(held[:6])


def test_operations_of_a_mode_are_those_of_every_call():
    """A selective checkpoint looks for each of them again in the backward pass."""
    checkpoint = torch.utils.checkpoint
    scheme, kernel = posenc.RoPE(HEAD_DIM), "_scaled_dot_product_flash_attention_for_cpu"

    def contexts():
        saved = [getattr(torch.ops.aten, kernel).default]
        return checkpoint.create_selective_checkpoint_contexts(saved)

    for _ in range(4):
        q = vectors(scheme, 9)[0].requires_grad_()
        posenc_torch.attention(q, 2 * q, q, scheme, causal=True)
        out = checkpoint.checkpoint(
            lambda q: posenc_torch.attention(q, 2 * q, q, scheme, causal=True), q,
            use_reentrant=False, context_fn=contexts,
        )  # fmt: skip
        out.sum().backward()


def test_hooks_of_saved_tensors_may_be_forbidden():
    arrays = vectors(posenc.ALiBi(4))
    expected = results(arrays, posenc.ALiBi(4), grad=True)
    repeated._kept.clear()
    for _ in range(4):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            found = results(arrays, posenc.ALiBi(4), grad=True)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_nested_tensors_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a better layout
        nested = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])
    for _ in range(3):
        with pytest.raises(TypeError, match="q is a nested tensor"):
            posenc_torch.attention(nested, nested, nested, posenc.NoPE())


def test_programs_keep_nothing():
    scheme, arrays = posenc.ALiBi(4), vectors(posenc.ALiBi(4))

    def attend(q):
        return posenc_torch.attention(
            q, *arrays[1:], scheme, causal=True, implementation="reference"
        )

    for _ in range(3):
        torch.func.vmap(attend)(torch.stack([arrays[0]] * 2))
        torch.func.jvp(attend, (arrays[0],), (arrays[0],))
    whole = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(whole(arrays[0]), attend(arrays[0]))
    repeated._kept.clear()
    for _ in range(3):
        whole(arrays[0])
    assert not kept()


def test_threads_may_call_at_once():
    scheme, errors = posenc.ALiBi(4), []
    arrays = {n: vectors(scheme, n, n) for n in range(1, 9)}
    expected = {n: results(each, scheme, grad=False)[0] for n, each in arrays.items()}

    def work():
        try:
            for _ in range(20):
                for n, each in arrays.items():
                    assert torch.equal(results(each, scheme, grad=False)[0], expected[n])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
