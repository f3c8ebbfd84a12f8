"""The test kit itself: each law is broken by somebody and says so; expectations are strict."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
import pytest
import wrong_rows
import wrong_schemes
from sample import long, some
from subjects import SUBJECTS, normal
from wrong_schemes import Decay

import posenc
import posenc.testing
from posenc import FeatureSpec, ParamSpec, PositionScheme
from posenc.attn.hidden_width import hidden_width
from posenc.schemes import FIRE, Chunk, FoX, LearnedRoPE, Sink, Sum
from posenc.testing import (
    BrokenLawError,
    SchemeCase,
    check_scheme,
    frameworks,
    laws,
    parametrize_laws,
)
from posenc.testing.examples import (
    HEAD_DIM,
    HEADS,
    HIDDEN_DIM,
    Fading,
    Sharpening,
    uniform,
)
from posenc.testing.large_biases import rounding_of_biases
from posenc.testing.lawbook.attention import _hard_call, assert_attention_near, reference
from posenc.testing.tolerances import ATTENTION_TOL, UNIT

NETWORK = FIRE(HEADS, hidden=8, init_len=12.5, offset=True)
DIFFERENTIABLE = [name for name, found in frameworks().items() if found.differentiable]


class Ours(posenc.ALiBi):
    """The right one; each class below does one thing wrong."""


@dataclass(frozen=True)
class Shared(Ours):
    """A bias that looks at other keys."""

    def bias(self, q, k, *, params, xp):
        return super().bias(q, k, params=params, xp=xp) - xp.astype(xp.max(k), xp.float32) / 64


@dataclass(frozen=True)
class Infinite(Decay):
    """Infinite, upwards, at one distance."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return xp.where(xp.abs(q - k) == 2**20 - 1, -found / 0.0, found)


@dataclass(frozen=True)
class Absolute(Ours):
    """Relative, it says."""

    def bias(self, q, k, *, params, xp):
        m = params["slopes"]
        return super().bias(q, k, params=params, xp=xp) * (1 + xp.astype(q, m.dtype) / 7)


@dataclass(frozen=True)
class Averaged(Decay):
    """A head reads the numbers of all heads, and does not say so."""

    def bias(self, q, k, *, params, xp):
        return super().bias(q, k, params=params, xp=xp) * xp.mean(params["p"])


@dataclass(frozen=True)
class Modest(Decay, relative=False):
    """Does not say that it is relative."""


@dataclass(frozen=True)
class Backwards(Ours):
    """A key bias of the wrong sign."""

    def key_bias(self, k, *, params, xp):
        return -super().key_bias(k, params=params, xp=xp)


@dataclass(frozen=True)
class Silent(Ours):
    """Does not say that its bias is a term of the query and one of the key."""

    def key_bias(self, k, *, params, xp):
        return None


@dataclass(frozen=True)
class ByIndex(posenc.RoPE):
    """Turned by the place in memory."""

    def transform(self, x, pos, *, role, params, xp):
        places = xp.arange(x.shape[-2], dtype=pos.dtype)
        return super().transform(x, 0 * pos + places, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Ahead(posenc.RoPE):
    """Its rotary is not what its transform uses."""

    def transform(self, x, pos, *, role, params, xp):
        return super().transform(x, pos + 1, role=role, params=params, xp=xp)

    def rotary(self, pos, *, dtype, params, xp):
        return super().rotary(pos, dtype=dtype, params=params, xp=xp)


@dataclass(frozen=True)
class Secretive(LearnedRoPE):
    """Its rotary reads a learned array that it does not name."""

    def rotary_params(self):
        return frozenset()


@dataclass(frozen=True)
class Counting(Sharpening):
    """Absolute, by the place in memory."""

    def transform(self, x, pos, *, role, params, xp):
        places = xp.arange(x.shape[-2], dtype=pos.dtype)
        return super().transform(x, 0 * pos + places, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Wide(posenc.RoPE):
    """Half precision comes back as float32."""

    def transform(self, x, pos, *, role, params, xp):
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        return super().transform(xp.astype(x, work), pos, role=role, params=params, xp=xp)


@dataclass(frozen=True)
class Narrow(posenc.RoPE):
    """Turned in half precision, where its input is."""

    def transform(self, x, pos, *, role, params, xp):
        sin, cos = (xp.astype(a, x.dtype) for a in self._turns.sincos(pos, dtype=xp.float32, xp=xp))
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        return xp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


@dataclass(frozen=True)
class Flowing(posenc.Sinusoidal):
    """An embedding less its mean over the positions asked for."""

    def embedding(self, pos, *, params, xp):
        found = super().embedding(pos, params=params, xp=xp)
        return found - xp.mean(found, axis=tuple(range(found.ndim - 1)), keepdims=True)


@dataclass(frozen=True)
class Mixing(Fading):
    """A gate that looks at its neighbours."""

    def log_gates(self, x, *, params, xp):
        centred = x - xp.mean(x, axis=-2, keepdims=True)
        return super().log_gates(centred, params=params, xp=xp)


@dataclass
class Thawed(posenc.PositionScheme):
    """Not frozen."""

    num_heads: int = HEADS
    __hash__ = object.__hash__


CACHE = {}


@dataclass(frozen=True)
class Remembering(posenc.RoPE):
    """Keeps its frequencies under a name that forgets the base."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "_turns", CACHE.setdefault(self.head_dim, self._turns))


@dataclass(frozen=True)
class Idle(Ours):
    """A field that changes nothing."""

    strength: float = 1.0


@dataclass(frozen=True)
class Unread(Decay):
    """Declares a param that it never reads."""

    def param_specs(self):
        return {**super().param_specs(), "z": ParamSpec((self.num_heads,))}


@dataclass(frozen=True)
class Twice(PositionScheme):
    """A query sees keys of its own chunk in both of its regions."""

    def regions(self):
        return (Chunk(4), (3, 3)), (Chunk(4, (1, 0)), (7, 0))


@dataclass(frozen=True)
class Restless(Decay):
    """Draws from a generator of its own."""

    def param_specs(self):
        own = np.random.default_rng()
        return {n: ParamSpec(s.shape, lambda rng, shape: own.random(shape) + 0.1)
                for n, s in super().param_specs().items()}  # fmt: skip


@dataclass(frozen=True)
class Growing(Decay):
    """Another number of params at another length."""

    def at_length(self, length):
        return Growing(num_heads=2 * self.num_heads)


@dataclass(frozen=True)
class Stale(Ours):
    """NumPy constants, whatever is asked for."""

    def bias(self, q, k, *, params, xp):
        found = super().bias(q, k, params=params, xp=xp)
        return found if "numpy" in xp.__name__ else found * 1.001


@dataclass(frozen=True)
class Writing(posenc.RoPE):
    """Turns its argument where it lies, if it can."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        if "torch" in xp.__name__ and not x.requires_grad:
            x.copy_(found)
        return found


@dataclass(frozen=True)
class Detached(Decay):
    """A param that no gradient reaches."""

    def bias(self, q, k, *, params, xp):
        own = {**params, "p": xp.round(64 * params["p"]) / 64}
        return super().bias(q, k, params=type(params)(own, params.dtype), xp=xp)


@dataclass(frozen=True)
class OneHead(Decay):
    """Heads beside the first keep what they were drawn as."""

    strength: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)

    def constants(self):
        return {"strength": self.strength}

    def bias(self, q, k, *, params, xp):
        return params["strength"] * super().bias(q, k, params=params, xp=xp)


@dataclass(frozen=True)
class Crooked(Decay):
    """A gradient that is not the derivative."""

    def bias(self, q, k, *, params, xp):
        a = params["a"]
        fixed = a.detach() if hasattr(a, "detach") else _stopped(a, xp)
        own = type(params)({**params, "a": (a + fixed) / 2}, params.dtype)
        return super().bias(q, k, params=own, xp=xp)


def _stopped(array, xp):
    if "jax" not in xp.__name__:
        return array
    import jax

    return jax.lax.stop_gradient(array)


@dataclass(frozen=True)
class Peeking(posenc.RoPE):
    """Not the same under a compiler."""

    eager: bool = field(default=True, compare=False)

    def transform(self, x, pos, *, role, params, xp):
        compiled = not hasattr(x, "numpy") and "jax" in xp.__name__ and _traced(x)
        compiling = getattr(getattr(xp, "compiler", None), "is_compiling", bool)()
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        return found * 1.01 if compiled or compiling else found


def _traced(array):
    import jax

    return isinstance(array, jax.core.Tracer)


@dataclass(frozen=True)
class Squares(Decay):
    """Integers that wrap where 32 bits end."""

    def bias(self, q, k, *, params, xp):
        return -params["a"] * xp.astype((q - k) ** 2, params["a"].dtype)


@dataclass(frozen=True)
class TooNear(posenc.T5Bias):
    """Claims other distances than those from which on it is constant."""

    sides: tuple[int | None, int | None] = (8, 8)

    def constant_beyond(self):
        return self.sides


@dataclass(frozen=True)
class Ending(FoX):
    """A bias of features that claims an end."""

    def constant_beyond(self):
        return 128, None


@dataclass(frozen=True)
class Diagonal(Ours):
    """A bonus where a key is the query's own, which no key bias can tell."""

    def bias(self, q, k, *, params, xp):
        own = xp.astype(q == k, params["slopes"].dtype)
        return super().bias(q, k, params=params, xp=xp) + own


@dataclass(frozen=True)
class Growing2(Ours, relative=False):
    """Slopes that grow with the query, from 512 on."""

    def bias(self, q, k, *, params, xp):
        m = params["slopes"]
        times = xp.where(q > 512, xp.astype(q, m.dtype) / 512, xp.ones_like(xp.astype(q, m.dtype)))
        return super().bias(q, k, params=params, xp=xp) * times


@dataclass(frozen=True)
class Unguarded(Decay):
    """A branch that is not taken, whose gradient overflows."""

    def bias(self, q, k, *, params, xp):
        z = params["a"] * xp.astype(xp.abs(q - k), params["a"].dtype)
        return -params["p"] * xp.where(z > 20, z, xp.log1p(xp.exp(z)))


@dataclass(frozen=True)
class Mistyped(Ours):
    """A method of another name."""

    def key_bais(self, k, *, params, xp):
        return super().key_bias(k, params=params, xp=xp)


@dataclass(frozen=True)
class Overflowing(Fading):
    """The logarithm of a sigmoid, as it is written."""

    def log_gates(self, x, *, params, xp):
        z = xp.matmul(x, xp.matrix_transpose(params["w"])) + params["b"]
        return -xp.log1p(xp.exp(-z))


@dataclass(frozen=True)
class Exploding(posenc.RoPE):
    """Scaled by a power of the position."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        power = 1.001 ** xp.astype(pos if role == "query" else -pos, xp.float32)
        return xp.astype(found * power[..., None], x.dtype)


@dataclass(frozen=True)
class Mixed(posenc.NoPE):
    """Keys less those of the first head."""

    def transform(self, x, pos, *, role, params, xp):
        return x if role == "query" else x - x[..., :1, :, :]


@dataclass(frozen=True)
class Product(posenc.PositionScheme):
    """Angles by a float32 product."""

    head_dim: int

    def transform(self, x, pos, *, role, params, xp):
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        angle = xp.astype(pos, work)[..., None] * 0.7
        half = x.shape[-1] // 2
        first, second = xp.astype(x[..., :half], work), xp.astype(x[..., half:], work)
        sin, cos = xp.sin(angle), xp.cos(angle)
        turned = xp.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return xp.astype(turned, x.dtype)


@dataclass(frozen=True)
class Short(Ours):
    """Fails at lengths that nobody tried."""

    def at_length(self, length):
        if length > 1000:
            raise RuntimeError
        return self


WRONG = {
    "answers_as_numpy_does (wraps)": Squares(),
    "key_bias_is_as_claimed (diagonal)": Diagonal(HEADS),
    "key_bias_is_as_claimed (far)": Growing2(HEADS),
    "gradients_of_the_bias_are_finite": Unguarded(),
    "hooks_are_those_of_the_protocol": Mistyped(HEADS),
    "features_are_row_local (large)": Overflowing(),
    "tokens_far_away_are_finite": Exploding(HEAD_DIM),
    "transform_is_row_local (heads)": Mixed(),
    "float32_is_float64_rounded": Product(HEAD_DIM),
    "at_length_is_a_scheme_of_its_kind (long)": Short(HEADS),
    "bias_is_elementwise": Shared(HEADS),
    "tile_is_slice": Shared(HEADS),
    "a_slice_of_heads_is_that_of_the_whole": Averaged(),
    "a_slice_of_heads_that_share_keys_is_that_of_the_whole": Averaged(),
    "bias_is_finite_or_masks": Infinite(),
    "relative_is_as_claimed": Absolute(HEADS),
    "relative_is_as_claimed (unsaid)": Modest(),
    "constant_beyond_is_as_claimed": TooNear(HEADS),
    "constant_beyond_is_as_claimed (one side)": TooNear(HEADS, sides=(128, 8)),
    "constant_beyond_is_as_claimed (unsaid)": TooNear(HEADS, sides=(128, None)),
    "constant_beyond_is_as_claimed (features)": Ending(HEADS, HIDDEN_DIM),
    "key_bias_is_as_claimed": Backwards(HEADS),
    "key_bias_is_as_claimed (unsaid)": Silent(HEADS),
    "transform_is_row_local": ByIndex(HEAD_DIM),
    "rotary_made_before_changes_nothing": Ahead(HEAD_DIM),
    "rotary_made_before_changes_nothing (params)": Secretive(HEAD_DIM),
    "half_precision_rounds_once": Wide(HEAD_DIM),
    "half_precision_rounds_once (twice)": Narrow(HEAD_DIM),
    "embedding_is_one_row_per_position": Flowing(HEAD_DIM),
    "features_are_row_local": Mixing(),
    "scheme_is_a_frozen_value": Thawed(),
    "schemes_share_no_state": Remembering(HEAD_DIM),
    "schemes_share_no_state (idle)": Idle(HEADS),
    "reads_what_it_declares": Unread(),
    "each_pair_is_in_one_region": Twice(),
    "first_values_are_declared": Restless(),
    "at_length_is_a_scheme_of_its_kind": Growing(),
    "answers_as_numpy_does": Stale(HEADS),
    "arguments_stay_as_they_were": Writing(HEAD_DIM),
    "gradient_reaches_every_param": Detached(),
    "gradient_reaches_every_param (a head)": OneHead(),
    "gradients_are_derivatives": Crooked(),
    "compiled_equals_eager": Peeking(HEAD_DIM),
    "compiled_attention_equals_eager": Peeking(HEAD_DIM),
    "order_in_memory_does_not_matter": ByIndex(HEAD_DIM),
    "packed_equals_separate": Counting(),
    "left_padding_changes_nothing": Counting(),
    "decoding_equals_prefill": ByIndex(HEAD_DIM),
    "cache_may_hold_transformed_keys": ByIndex(HEAD_DIM),
    "causal_hides_the_future": Mixing(),
    "relative_scheme_may_begin_anywhere": Absolute(HEADS),
    **wrong_schemes.WRONG,
    **wrong_rows.WRONG,
}


# Of each law the first way to break it; compiling every implementation takes half a minute.
FIRST = {case.split(" ")[0]: case for case in reversed(WRONG)}
FIRST = [case for law, case in FIRST.items() if law != "compiled_attention_equals_eager"]


def tried(law):
    """Fast scopes, and for each law a framework on which it can be broken."""
    return law.compiler != "inductor" and str(law.framework) not in ("strict", "strict-no-float64")


@pytest.mark.skipif(not DIFFERENTIABLE, reason="neither torch nor jax is installed")
@pytest.mark.parametrize("case", some(WRONG, FIRST, long))
def test_a_broken_law_is_noticed(case):
    name, subject = case.split(" ")[0], SchemeCase(WRONG[case])
    message = next(filter(None, (said(law, subject) for law in laws() if law.name == name)), None)
    assert message is not None, f"{name} holds"
    assert message.startswith(f"{name}: ")
    assert type(subject.scheme).__name__ in message


def said(law, subject):
    """What a broken law says; None if it holds, or is not tried here."""
    if not tried(law):
        return None
    try:
        law(subject)
    except BrokenLawError as error:
        return str(error)
    except NotImplementedError:
        return None
    return None


def test_every_law_can_be_broken():
    # Some speak of the implementations and not of the scheme: a fault in an implementation breaks
    # them, and the run of mutations plants such faults.
    of_paths = {
        "implementation_equals_the_reference",
        "implementation_equals_the_reference_in_other_floats",
        "implementation_takes_all_options",
        "batch_rows_are_independent",
        "regions_are_merged",
    }
    assert {law.name for law in laws()} == of_paths | {case.split(" ")[0] for case in WRONG}


def test_the_first_broken_law_is_raised():
    with pytest.raises(
        BrokenLawError, match=r"(?s)relative_is_as_claimed: .*Absolute.*claimed, but"
    ):
        check_scheme(Absolute(HEADS), frameworks=["numpy"])


def test_an_exception_needs_its_reason_to_hold():
    silent, why = Silent(HEADS), "left out to keep the file short"
    known = {"key_bias_is_as_claimed": why}
    check_scheme(silent, frameworks=["numpy"], expected_failures=known)
    with pytest.raises(BrokenLawError, match=f"is kept, though expected_failures says: {why}"):
        check_scheme(posenc.ALiBi(HEADS), frameworks=["numpy"], expected_failures=known)
    with pytest.raises(ValueError, match=r"no law 'relative_is_claimed' .did you mean"):
        check_scheme(silent, frameworks=["numpy"], expected_failures={"relative_is_claimed": why})


def test_a_failure_may_be_expected_in_one_scope():
    here = {"causal_hides_the_future-numpy-reference": "the gate looks at its neighbours"}
    mixing = {"features_are_row_local": "likewise", "decoding_equals_prefill": "", **here}
    _, cases = parametrize_laws(
        [Mixing()], frameworks=["numpy"], expected_failures=lambda scheme: mixing
    ).args
    assert [case.id.removesuffix(f"-{Mixing()}") for case in cases if case.marks] == [
        "features_are_row_local",
        "decoding_equals_prefill-numpy-reference",
        "causal_hides_the_future-numpy-reference",
    ]


@pytest.mark.parametrize("kind", wrong_rows.NESTED)
def test_what_a_region_does_is_served_or_refused_or_breaks_a_law(kind):
    scheme, expected = wrong_rows.NESTED[kind]
    (law,) = (law for law in laws(["numpy"]) if law.name == "regions_are_merged")
    vectors = normal((3, 1, HEADS, 90, HEAD_DIM), 5)
    given = {"params": posenc.init_params(scheme), "causal": True}
    try:
        found = posenc.attention(*vectors, scheme, **given)
    except (ValueError, NotImplementedError):
        served = False
    else:
        served = np.allclose(found, expected(*vectors), rtol=0, atol=ATTENTION_TOL["float64"])
    if served:
        law(scheme)
    else:
        with pytest.raises(BrokenLawError, match="regions_are_merged"):
            law(scheme)


@pytest.mark.parametrize("kind", wrong_rows.RIGHT)
def test_what_wrong_ones_began_with_is_right(kind):
    check_scheme(wrong_rows.RIGHT[kind], frameworks=["numpy"])


GRADIENTS = ("gradients_are_derivatives", "gradient_reaches_every_param")


@pytest.mark.parametrize("name", DIFFERENTIABLE[-1:])
@pytest.mark.parametrize("kind", ["steps of 1e4", "slopes of 1e4", "learned slopes of 1e4"])
def test_gradients_of_large_biases_are_right(kind, name):
    for law in laws([name]):
        if law.name in GRADIENTS and law.implementation in ("chunked", "folded", "reference"):
            with suppress(NotImplementedError):
                law(wrong_rows.RIGHT[kind])


def test_tolerances_grow_with_large_biases_alone():
    def bound(scheme):
        call = _hard_call(SchemeCase(scheme))
        return rounding_of_biases(call), np.max(np.abs(call.prepared().bias()))

    none, size = bound(posenc.T5Bias(HEADS))
    assert size <= 8
    assert none.of_weight == 0
    assert not np.any(none.of_result)
    large, size = bound(wrong_rows.Steps())
    assert size > 1e5
    call = _hard_call(SchemeCase(wrong_rows.Steps()))
    numpy = frameworks()["numpy"]
    error = np.abs(call.attend(numpy, "reference", dtype="float32") - reference(call))
    assert np.all(error <= large.of_result + ATTENTION_TOL["float32"])
    # Four roundings of the largest bias move two weights by half of them each, at most.
    assert np.max(error) < np.max(large.of_result) < 4 * size * UNIT["float32"] * 4
    wide = rounding_of_biases(call, "float64")
    np.testing.assert_allclose(wide.of_result * 2**29, large.of_result, rtol=0.1)
    # Keys that have no weight may have any bias.
    steep, _ = bound(posenc.ALiBi(HEADS, slopes=[1e4] * HEADS))
    assert np.max(steep.of_result) < ATTENTION_TOL["float32"]


def test_a_large_bias_hides_no_fault():
    call = _hard_call(SchemeCase(wrong_rows.Steps()))
    right = reference(call)
    assert_attention_near(right, right, call)
    off = 40 * np.max(rounding_of_biases(call).of_result)
    with pytest.raises(AssertionError, match="off, by up to"):
        assert_attention_near(right + off, right, call)


@pytest.mark.parametrize("scheme", [NETWORK, FIRE(3, hidden=4, offset=True), Fading()])
def test_what_is_right_in_long_rows_and_large_batches_is_not_refused(scheme):
    check_scheme(scheme, frameworks=["numpy"])


@dataclass(frozen=True)
class Offset(Decay):
    """The same number at every key, as the last offset of FIRE's network. Its gradient is 0 or a
    rounding; here it is 0.
    """

    def param_specs(self):
        return {**super().param_specs(), "b": ParamSpec((self.num_heads,))}

    def bias(self, q, k, *, params, xp):
        own = wrong_schemes.stopped(params["b"], xp)
        return super().bias(q, k, params=params, xp=xp) + own


@pytest.mark.parametrize("name", DIFFERENTIABLE[-1:])
def test_what_softmax_cannot_see_need_not_learn(name):
    own = [law for law in laws([name]) if law.compiler is None]
    tried = [law for law in own if law.implementation == "reference"]
    for law in tried:
        law(NETWORK)
    (reaches,) = (law for law in tried if law.name == "gradient_reaches_every_param")
    reaches(Offset())


def test_a_law_says_where_it_is_broken():
    with pytest.raises(
        BrokenLawError, match=r"head 0: .* at query 41 differs between key -\d+ and"
    ):
        check_scheme(wrong_schemes.FarKeys(HEADS), frameworks=["numpy"])
    with pytest.raises(BrokenLawError, match=r"alone: |\(5, 9, 12\), with another token"):
        check_scheme(wrong_schemes.CrowdedGate(), frameworks=["numpy"])


NUMBER = r"-?[\d.e+-]+"
PAIR = r"batch \d, head \d, query position -?\d+, key position -?\d+"
TOKEN = r"batch \d, head \d, (query|key) position -?\d+, channel \d+"


@pytest.mark.parametrize(
    ("law", "scheme", "place"),
    [
        ("tile_is_slice", wrong_rows.Row5000(), f"{NUMBER}, expected {NUMBER} at {PAIR}"),
        ("tile_is_slice", wrong_schemes.Crowded(), f"{NUMBER}, expected {NUMBER} at {PAIR}"),
        ("bias_is_elementwise", Shared(HEADS), f"{NUMBER}, expected {NUMBER} at {PAIR}"),
        ("bias_is_finite_or_masks", wrong_rows.OnceNaN(), f"nan, expected a finite .* at {PAIR}"),
        ("relative_is_as_claimed", Absolute(HEADS), f"the bias at {PAIR} is {NUMBER}, and"),
        ("each_pair_is_in_one_region", wrong_rows.Meeting(far=64), f"in 2 regions: {PAIR}"),
        ("transform_is_row_local", ByIndex(HEAD_DIM), f"{NUMBER}, expected {NUMBER} at {TOKEN}"),
        ("adjusted_rows_may_be_long", wrong_rows.LongAdjusting(), f"expected {NUMBER} at {TOKEN}"),
        ("decoding_equals_prefill", ByIndex(HEAD_DIM), f"{NUMBER}, expected {NUMBER} at {TOKEN}"),
    ],
)
def test_a_law_names_the_first_failing_pair(law, scheme, place):
    own = next(each for each in laws(["numpy"]) if each.name == law)
    with pytest.raises(BrokenLawError, match=place):
        own(scheme)


def test_the_failing_pair_is_the_one_that_differs():
    own = next(each for each in laws(["numpy"]) if each.name == "bias_is_finite_or_masks")
    with pytest.raises(BrokenLawError) as broken:
        own(wrong_rows.OnceNaN())
    query, key = (int(n) for n in re.findall(r"position (-?\d+)", str(broken.value)))
    assert abs(query - key) == 3001


@pytest.mark.skipif(not DIFFERENTIABLE, reason="neither torch nor jax is installed")
def test_a_wrong_gradient_is_found_among_all_numbers():
    name = "gradients_of_parts_are_derivatives"
    law = next(x for x in laws(DIFFERENTIABLE[-1:]) if x.name == name)
    with pytest.raises(BrokenLawError, match=r"bias at \(\d, \d, \d, \d\) of positions .*along a"):
        law(wrong_schemes.FarFromRight())


def test_a_framework_that_is_asked_for_must_be_there():
    with pytest.raises(ModuleNotFoundError, match="'mxnet', installed are: numpy"):
        check_scheme(posenc.NoPE(), frameworks=["mxnet"])


@pytest.mark.parametrize("wrong", [posenc.ALiBi, "alibi", None])
def test_a_class_is_no_scheme(wrong):
    with pytest.raises(TypeError, match="scheme must be an instance"):
        check_scheme(wrong)


def test_the_width_of_hidden_states_is_found_or_asked_for():
    assert SchemeCase(FoX(HEADS, HIDDEN_DIM)).hidden_dim == HIDDEN_DIM
    assert SchemeCase(Sum(posenc.RoPE(HEAD_DIM), FoX(HEADS, HIDDEN_DIM))).hidden_dim == HIDDEN_DIM

    class Odd(FoX):
        def log_gates(self, x, *, params, xp):
            raise ValueError

    with pytest.raises(
        ValueError, match=r"hidden_dim: the features of .* accept hidden states of none"
    ):
        SchemeCase(Odd(HEADS, HIDDEN_DIM))


@dataclass(frozen=True)
class OfThreeTokens(PositionScheme):
    """One matrix reads the hidden states of three tokens side by side."""

    hidden_dim: int = 10

    def param_specs(self):
        return {"w": ParamSpec((2, 3 * self.hidden_dim))}

    def feature_specs(self):
        return {"c": FeatureSpec(self.side_by_side, of="key", lookback=2)}

    def side_by_side(self, x, *, params, xp):
        wide = xp.reshape(x, (*x.shape[:2], -1))
        return xp.matmul(wide, xp.matrix_transpose(params["w"]))


def test_hidden_states_of_several_tokens_may_be_side_by_side():
    assert hidden_width(OfThreeTokens(), posenc.init_params(OfThreeTokens())) == 10


@dataclass(frozen=True)
class NearAndFar(PositionScheme):
    """RoPE for near keys, and ALiBi, which has constants, for far ones."""

    def regions(self):
        far = posenc.ALiBi(HEADS)
        return (posenc.RoPE(HEAD_DIM), (2, 2)), (far, (None, -3)), (far, (-3, None))


def test_regions_may_have_constants():
    check_scheme(NearAndFar(), frameworks=["numpy"])


def test_sizes_are_those_of_the_parts():
    both = Sum(posenc.RoPE(6), posenc.Learned(max_len=40, dim=8))
    assert SchemeCase(both).head_dim == 6
    assert SchemeCase(both).positions == (0, 39)
    groups = SchemeCase(Sink(posenc.ALiBi(3))).named_variants()
    assert "learned=False" in {change for group in groups for change, _ in group}


@dataclass(frozen=True)
class Bounded(PositionScheme, relative=True):
    """A table of distances that ends."""

    max_len: int = 64

    def param_specs(self):
        return {"table": ParamSpec((HEADS, 2 * self.max_len - 1))}

    def bias(self, q, k, *, params, xp):
        return params["table"][k - q + self.max_len - 1]


def test_positions_are_those_that_the_scheme_takes():
    assert SchemeCase(posenc.ALiBi(2)).positions == (-(2**30), 2**30 - 1)
    assert SchemeCase(posenc.Learned(max_len=40, dim=8)).positions == (0, 39)
    assert SchemeCase(Bounded()).positions == (0, 63)
    check_scheme(Bounded(), frameworks=["numpy"])
    with pytest.raises(ValueError, match=r"positions are 0 \.\. 7 .* max_len >= 20"):
        check_scheme(Bounded(max_len=8), frameworks=["numpy"])


@dataclass(frozen=True)
class Unclipped(PositionScheme, relative=True):
    """A table of 64 distances, and no word of it."""

    def param_specs(self):
        return {"table": ParamSpec((HEADS, 64))}

    def bias(self, q, k, *, params, xp):
        return params["table"][xp.abs(k - q)]


def test_an_index_outside_is_no_claim_to_fewer_positions():
    with pytest.raises(ValueError, match=r"fails at positions .* field max_len, or SchemeCase"):
        SchemeCase(Unclipped())
    check_scheme(Unclipped(), frameworks=["numpy"], positions=(0, 63))


@dataclass(frozen=True)
class NearTurn(posenc.RoPE):
    """Not a number from position 64 on."""

    def transform(self, x, pos, *, role, params, xp):
        found = super().transform(x, pos, role=role, params=params, xp=xp)
        return xp.where((pos < 64)[..., None], found, xp.nan * found)


def test_wider_heads_have_the_positions_of_the_case():
    check_scheme(NearTurn(HEAD_DIM), frameworks=["numpy"], positions=(0, 63))


class Kind(Enum):
    LOG, SQUARE = "log", "square"


@dataclass(frozen=True)
class Kinds(Decay):
    """Fields of kinds that are varied too, none of which is read."""

    kind: Kind = Kind.LOG


@dataclass(frozen=True)
class Words(Decay):
    kind: Literal["log", "square"] = "log"


@dataclass(frozen=True)
class Perhaps(Decay):
    limit: int | None = None


@pytest.mark.parametrize("idle", [Kinds(), Words(), Perhaps()])
def test_fields_of_many_kinds_are_varied(idle):
    with pytest.raises(BrokenLawError, match=r"(?s)schemes_share_no_state.*same results"):
        check_scheme(idle, frameworks=["numpy"])


@dataclass(frozen=True)
class Tempered(PositionScheme):
    """Keys that each head scales in its own way."""

    def param_specs(self):
        return {"rate": ParamSpec((HEADS,), uniform(0.5, 2))}

    def transform(self, x, pos, *, role, params, xp):
        rate = params["rate"]
        times = 1 + rate * (xp.astype(xp.abs(pos), rate.dtype)[..., None] > 3)
        return xp.astype(xp.astype(x, rate.dtype) * times, x.dtype)


def test_keys_that_heads_share_have_no_transform_of_one_heads_own():
    scheme = Tempered()
    check_scheme(scheme, frameworks=["numpy"])
    q, k = np.ones((1, HEADS, 3, HEAD_DIM), np.float32), np.ones((1, 2, 3, HEAD_DIM), np.float32)
    with pytest.raises(ValueError, match=r"2 heads, but 'rate' is per head, for 4: .*\(GQA\)"):
        posenc.attention(q, k, k, scheme, posenc.init_params(scheme))


def test_laws_that_are_tried_at_once_come_first():
    of_schemes = [law.framework is None for law in laws()]
    assert of_schemes == sorted(of_schemes, reverse=True)
    assert laws()[0].name == "scheme_is_a_frozen_value"


def test_an_error_in_a_scheme_is_shown_with_its_place():
    @dataclass(frozen=True)
    class Missing(Decay):
        def bias(self, q, k, *, params, xp):
            return -params["slope"]

    (law,) = (x for x in laws(["numpy"]) if x.name == "tile_is_slice")
    message = r"(?s)has no param or constant 'slope'; it has: a, p.*test_testing.py"
    with pytest.raises(BrokenLawError, match=message):
        law(Missing())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: check_scheme(posenc.NoPE(), frameworks="numpy"), "must be a list of names"),
        (
            lambda: check_scheme(SchemeCase(posenc.NoPE()), head_dim=4),
            "head_dim: a SchemeCase has its",
        ),
        (lambda: SchemeCase(posenc.NoPE(), head_dim=7.5), "head_dim must be an integer"),
        (lambda: SchemeCase(posenc.NoPE(), params={"a": np.ones(2)}), "NoPE has no param 'a'"),
        (lambda: parametrize_laws(posenc.NoPE()), "schemes must be several"),
        (
            lambda: SchemeCase(type("Duck", (), {"param_specs": dict, "hooks": frozenset})()),
            "must inherit from",
        ),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_two_schemes_of_one_name_are_two_tests():
    many = parametrize_laws([posenc.NoPE(), posenc.NoPE()], frameworks=["numpy"]).args[1]
    assert len(many) == 2 * len(laws(["numpy"]))
    assert parametrize_laws([posenc.NoPE()], frameworks=[]).args[1]
    assert SchemeCase(posenc.NoPE()) != SchemeCase(posenc.NoPE())  # and no error
    known = {"relative_is_as_claimed-torch": "of a framework that is not tried here"}
    parametrize_laws([posenc.NoPE()], frameworks=["numpy"], expected_failures=known)


def test_params_may_be_given():
    zeros = {"p": np.zeros(HEADS, np.float32), "a": np.ones(HEADS, np.float32)}
    with pytest.raises(BrokenLawError, match="schemes_share_no_state"):
        check_scheme(Decay(), frameworks=["numpy"], params=zeros)


def test_a_law_refused_by_the_definition_is_broken():
    @dataclass(frozen=True)
    class Refusing(posenc.NoPE):
        def transform(self, x, pos, *, role, params, xp):
            raise NotImplementedError("not today")

    (law,) = (x for x in laws(["numpy"]) if x.name == "decoding_equals_prefill")
    with pytest.raises(BrokenLawError, match="refused"):
        law(Refusing())


def test_tests_are_named_by_law_scope_and_scheme():
    known = {"relative_is_as_claimed": "a trial"}
    mark = parametrize_laws(
        {"mine": Decay()},
        frameworks=["numpy"],
        expected_failures=lambda scheme: known,
        select=lambda law, scheme: not law.name.startswith("implementation"),
    )
    names, cases = mark.args
    assert names == ("law", "scheme")
    ids = [case.id for case in cases]
    assert "decoding_equals_prefill-numpy-reference-mine" in ids
    assert not any(i.startswith("implementation") for i in ids)
    (marked,) = (case for case in cases if case.marks)
    assert marked.id == "relative_is_as_claimed-mine"
    assert marked.marks[0].kwargs == {"reason": "a trial", "strict": True}


def test_schemes_without_names_are_named_by_what_they_are():
    _, cases = parametrize_laws([posenc.NoPE()], frameworks=["numpy"]).args
    assert all(case.id.endswith("-NoPE()") for case in cases)


def test_what_each_law_says():
    for law in laws():
        assert law.statement.endswith("."), law.name
    assert len({str(law) for law in laws()}) == len(laws())


@pytest.mark.parametrize("subject", ["nope", "t5"])
def test_all_at_once(subject):
    check_scheme(SUBJECTS[subject], frameworks=["numpy"])


def test_a_scheme_may_inherit_the_protocol_alone():
    @dataclass(frozen=True)
    class Nothing(PositionScheme):
        pass

    (law,) = (x for x in laws(["numpy"]) if x.name == "bias_is_elementwise")
    law(Nothing())


def test_names_stay_what_they_are_once_laws_were_tried():
    check_scheme(posenc.NoPE(), frameworks=["numpy"])
    assert posenc.testing.laws is laws
    assert posenc.testing.frameworks is frameworks
