"""RoPE's scalings: numbers by hand and from mpmath, conventions, errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import oracles
import pytest
from frameworks import HAS
from sample import long

import posenc
from posenc.makers import fitted_options
from posenc.schemes import (
    NTK,
    PI,
    ClipHann,
    ClipPeriod,
    DynamicNTK,
    Llama3,
    LongRoPE,
    NTKMixed,
    Proportional,
    RoPE,
    Scaling,
    YaRN,
)

# With 8 channels and base 10**4 the frequencies are 1, 0.1, 0.01 and 0.001.
# YaRN: the index of r turns within L0 is log10(L0 / 2 pi r) there. For L0 = 6400 it is 1.5 for
# r = 32, so the ramp begins at 1, and 3.008 for r = 1, so it ends at 4.
BY_HAND = {
    "pi": (PI(4), [0.25, 0.025, 0.0025, 0.00025]),
    # 10**4 * 8**(8/6) = 20**4
    "ntk": (NTK(8), [1, 0.05, 0.0025, 0.000125]),
    "dynamic-short": (DynamicNTK(2, 64), [1, 0.1, 0.01, 0.001]),
    # 2 * 288/64 - 1 = 8
    "dynamic-long": (DynamicNTK(2, 64).at_length(288), [1, 0.05, 0.0025, 0.000125]),
    # 16**(-(1/4)**0.75) = 2**-sqrt(2), 16**(-(1/2)**0.75), 16**(-(3/4)**0.75), 1/16
    "ntk-mixed": (NTKMixed(16), [2 ** -(2**0.5), 0.1 * 2 ** -(2**1.25), None, 0.001 / 16]),
    "yarn": (YaRN(4, 6400), [1, 0.1, 0.01 * (2 / 3 + 1 / 12), 0.001 * (1 / 3 + 1 / 6)]),
    # The index of one turn is 2.68 for L0 = 3000: the ramp goes from 2 to 3.
    "yarn-equal": (YaRN(4, 3000, beta_fast=1, beta_slow=1), [1, 0.1, 0.01, 0.00025]),
    "yarn-turns-equal": (
        YaRN(4, 3000, beta_fast=1, beta_slow=1, ramp="turns"),
        [1, 0.1, 0.01, 0.00025],
    ),
    # 102, 10, 1.02 and 0.1 turns within L0 = 640
    "llama3-equal": (Llama3(2, 1, 1, 640), [1, 0.1, 0.01, 0.0005]),
    "llama3-low": (Llama3(train_len=3000), [1, 0.1, 0.01, 0.001 / 8]),
    "llama3-high": (Llama3(train_len=30_000), [1, 0.1, 0.01, 0.001]),
    "longrope-short": (LongRoPE((1, 2, 4, 8), (1, 1, 1, 2), 16), [1, 0.05, 0.0025, 0.000125]),
    "longrope-long": (
        LongRoPE((1, 2, 4, 8), (1, 1, 1, 2), 16).at_length(17),
        [1, 0.1, 0.01, 0.0005],
    ),
    "proportional": (Proportional(0.75), [1, 0.1, 0.01, 0]),
    "proportional-slower": (Proportional(0.4, factor=2), [0.5, 0, 0, 0]),  # int(3.2 // 2) = 1
    "clip-period": (ClipPeriod(100), [1, 0.1, 0, 0]),  # periods 6.3, 63, 628
    "clip-hann": (ClipHann(20), [1, 0.1, 0.005, 0]),  # tapers 1, 1/2, 0
    "clip-hann-one": (ClipHann(1000), [1, 0.1, 0.01, 0.001]),
    "nothing": (Scaling(), [1, 0.1, 0.01, 0.001]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_frequencies_by_hand(name):
    scaling, expected = BY_HAND[name]
    found = RoPE(8, scaling=scaling).frequencies()
    for f, e in zip(found, expected, strict=True):
        assert e is None or math.isclose(f, e, rel_tol=1e-14, abs_tol=0)


EXACT = [
    (NTK(4), 1e4, 8),
    (PI(1.1), 5e5, 6),
    (DynamicNTK(2.5, 64, length=777), 1e4, 8),
    (NTKMixed(3), 1e4, 12),
    (YaRN(16, 4096), 1e4, 128),
    (YaRN(16, 4096, truncate=False, beta_fast=20, beta_slow=2), 5e5, 24),
    (YaRN(16, 4096, ramp="turns"), 1e4, 64),
    (YaRN(4, 640), 10.0, 8),
    (LongRoPE((1.0,) * 4, (1.0, 1.1, 2.3, 4.7), 64, length=65), 1e4, 8),
    (Llama3(), 5e5, 128),
    (Proportional(0.3, 1.5), 1e4, 24),
    (ClipPeriod(512), 1e4, 32),
    (ClipHann(512), 1e4, 32),
]


@pytest.mark.parametrize(("scaling", "base", "dim"), EXACT, ids=lambda v: type(v).__name__)
def test_frequencies_have_all_their_digits(scaling, base, dim):
    with mpmath.workdps(60):
        expected, _ = oracles.scaled(scaling, base, dim)
        for f, e in zip(scaling.frequencies(base, dim), expected, strict=True):
            assert abs(mpmath.mpf(str(f)) - e) <= mpmath.mpf(10) ** -45


def test_the_two_ramps_of_yarn_differ_by_up_to_three():
    index, turns = (
        np.asarray(RoPE(128, scaling=YaRN(16, 4096, ramp=ramp)).frequencies())
        for ramp in ("index", "turns")
    )
    ratio = np.maximum(index / turns, turns / index)
    assert math.isclose(ratio.max(), 3.04, abs_tol=0.005)
    assert index[0] == turns[0] == 1
    assert math.isclose(index[-1], turns[-1], rel_tol=1e-14)


def test_the_ramp_of_yarn_ends_at_the_number_of_channels_less_one():
    # Base 10, 8 channels, L0 = 640: index 2.01 for 32 turns, and 8.03 for 1, which becomes 7.
    # So g is 4/5 at k = 3. A limit of D/2 - 1 = 3 would make it 0 there.
    found = RoPE(8, base=10.0, scaling=YaRN(4, 640)).frequencies()
    assert math.isclose(found[3], 10**-0.75 * (0.8 + 0.2 / 4), rel_tol=1e-14)


@pytest.mark.parametrize("length", [64, 4096])
def test_half_of_the_pairs_with_a_turn_in_training_are_rope_id(length):
    """The first and third quarter of the channels turn (Wertheimer et al. 2026)."""
    rope = posenc.make("p_rope", head_dim=16, p=0.5, base=(length / math.tau) ** 2)
    periods = [math.tau / f for f in rope.frequencies() if f]
    assert len(periods) == 4
    assert max(periods) < length
    assert math.tau / (rope.base ** (-2 * 4 / 16)) == pytest.approx(length)  # of the next pair
    ones = np.ones((1, 16))
    moved = posenc.transform(rope, ones, np.asarray([3]), role="query") != ones
    assert moved[0].tolist() == ([True] * 4 + [False] * 4) * 2


def test_proportional_is_not_partial():
    x, pos = np.eye(8)[:1], np.asarray([1])
    whole = posenc.transform(RoPE(8, scaling=Proportional(0.5)), x, pos, role="query")
    partial = posenc.transform(RoPE(8, rotary_dim=4), x, pos, role="query")
    np.testing.assert_allclose(np.nonzero(whole)[1], [0, 4])  # pairs of the whole head
    np.testing.assert_allclose(np.nonzero(partial)[1], [0, 2])
    assert RoPE(8, scaling=Proportional(0.5)).frequencies()[1] == pytest.approx(0.1)
    assert RoPE(8, rotary_dim=4).frequencies()[1] == pytest.approx(0.01)
    ones = np.ones(8, int)
    still = posenc.transform(RoPE(8, scaling=Proportional(0.5)), np.eye(8), ones, role="key")
    for channel in (2, 3, 6, 7):
        np.testing.assert_array_equal(still[channel], np.eye(8)[channel])


M16, M40 = 1.2772588722239782, 1.3688879454113936  # 0.1 ln(16) + 1, 0.1 ln(40) + 1
SHARE = (0.1 * 0.707 * math.log(40) + 1) / M40


@pytest.mark.parametrize(
    ("scaling", "factor", "of_scale"),
    [
        (PI(4), 1, 1),
        (YaRN(16, 64), M16, 1),
        (YaRN(0.5, 64), 1, 1),
        (YaRN(16, 64, attention_factor=1.5), 1.5, 1),
        (YaRN(40, 64, mscale=0.707, mscale_all_dim=1.0), SHARE, 1),
        (YaRN(16, 64, mscale=0.707, mscale_all_dim=0.0), M16, 1),  # 0 counts as not given
        (YaRN(16, 64, mscale=0.707), M16, 1),
        (YaRN(16, 64, mscale_all_dim=0.707), M16, 1),
        (YaRN(16, 64, apply_to="scale"), 1, M16**2),
        (YaRN(16, 64, attention_factor=1.5, apply_to="scale"), 1, 2.25),
        # DeepSeek-V3, and with unequal weights
        (YaRN(40, 64, mscale=1.0, mscale_all_dim=1.0, apply_to="scale"), 1, M40**2),
        (YaRN(40, 64, mscale=0.707, mscale_all_dim=1.0, apply_to="scale"), SHARE, M40**2),
        (LongRoPE((1,) * 4, (1,) * 4, 16), 1, 1),
        (LongRoPE((1,) * 4, (1,) * 4, 16, factor=4), 1.5**0.5, 1),  # ln 4 / ln 16 = 1/2
        (LongRoPE((1,) * 4, (1,) * 4, 16, factor=0.5), 1, 1),
        (LongRoPE((1,) * 4, (1,) * 4, 16, attention_factor=1.19), 1.19, 1),
    ],
)
def test_the_factor_of_cosines_and_that_of_the_scale(scaling, factor, of_scale):
    rope = RoPE(8, scaling=scaling)
    assert math.isclose(rope.attention_factor, factor, rel_tol=1e-15)
    assert math.isclose(rope.scale(64), of_scale / 8, rel_tol=1e-15)
    x = np.eye(8)[:1]
    turned = posenc.transform(rope, x, np.asarray([0]), role="key")
    np.testing.assert_allclose(turned, factor * x, rtol=1e-15)


def test_the_factor_is_the_same_on_angles_and_on_the_scale():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 9, 8))
    on_angles, on_scale = (
        posenc.attention(q, k, v, RoPE(8, scaling=YaRN(16, 8, apply_to=to)))
        for to in ("angles", "scale")
    )
    np.testing.assert_allclose(on_angles, on_scale, rtol=1e-13)


def test_the_factor_is_applied_before_the_last_cast():
    x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float16)
    rope, pos = RoPE(8, scaling=YaRN(16, 64)), np.arange(64)
    half, single = (
        posenc.transform(rope, x.astype(dtype), pos, role="key")
        for dtype in (np.float16, np.float32)
    )
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, single.astype(np.float16))


@pytest.mark.parametrize(
    "scaling", [DynamicNTK(2, 64), LongRoPE((1,) * 4, (2,) * 4, 64)], ids=["dynamic", "longrope"]
)
def test_only_a_longer_context_changes_the_frequencies(scaling):
    rope = RoPE(8, layout="interleaved", scaling=scaling)
    assert rope.at_length(64) is rope
    longer = rope.at_length(65)
    assert longer.frequencies() != rope.frequencies()
    assert longer.layout == "interleaved"
    assert longer.at_length(65) is longer
    assert longer.at_length(10) == rope
    assert longer.at_length(300) == rope.at_length(300)
    given = replace(rope, scaling=replace(rope.scaling, length=64))
    assert given.frequencies() == rope.frequencies()


def test_dynamic_ntk_is_ntk_at_its_length():
    dynamic = RoPE(16, scaling=DynamicNTK(3, 64)).at_length(128)
    assert dynamic.frequencies() == RoPE(16, scaling=NTK(4)).frequencies()  # 3 * 2 - 2
    assert RoPE(2, scaling=NTK(4)).frequencies() == (1.0,)


WRONG = {
    "pi-factor": (lambda: PI(0), ValueError, "factor must be .* greater than 0, got 0"),
    "ntk-factor": (lambda: NTK("4"), TypeError, "factor must be a number, got '4'"),
    "mixed-factor": (lambda: NTKMixed(math.nan), ValueError, "factor"),
    "dynamic-length": (lambda: DynamicNTK(2, 0), ValueError, "train_len must be at least 1"),
    "yarn-fast-0": (lambda: YaRN(4, 64, beta_fast=0), ValueError, "beta_fast .*, got 0"),
    "yarn-swapped": (
        lambda: YaRN(4, 64, beta_fast=1, beta_slow=32),
        ValueError,
        "beta_fast must be at least beta_slow=32, got 1",
    ),
    "yarn-ramp": (lambda: YaRN(4, 64, ramp="turn"), ValueError, "did you mean 'turns'"),
    "yarn-truncate": (lambda: YaRN(4, 64, truncate=1), TypeError, "truncate"),
    "yarn-apply": (lambda: YaRN(4, 64, apply_to="cos"), ValueError, "apply_to"),
    "yarn-mscale": (lambda: YaRN(4, 64, mscale=-1.0), ValueError, "mscale must be at least 0"),
    "yarn-base": (lambda: RoPE(8, base=1.0, scaling=YaRN(4, 64)), ValueError, "base must exceed 1"),
    "longrope-list": (lambda: LongRoPE(4, (1,), 64), TypeError, "short_factor must be a sequence"),
    "longrope-zero": (lambda: LongRoPE((1,), (0,), 64), ValueError, "long_factor"),
    "longrope-size": (
        lambda: RoPE(8, scaling=LongRoPE((1,) * 4, (1,) * 3, 64)),
        ValueError,
        "long_factor must have 4 numbers, .*, got 3",
    ),
    "longrope-one": (lambda: LongRoPE((1,), (1,), 1, factor=2), ValueError, "train_len"),
    "llama3-swapped": (
        lambda: Llama3(low_freq_factor=4, high_freq_factor=1),
        ValueError,
        "high_freq_factor must be at least low_freq_factor=4, got 1",
    ),
    "p": (lambda: Proportional(1.5), ValueError, "p must be from 0 to 1, got 1.5"),
    "p-partial": (
        lambda: RoPE(8, rotary_dim=4, scaling=Proportional(0.5)),
        ValueError,
        "rotary_dim must be None with Proportional",
    ),
    "clip": (lambda: ClipPeriod(2.5), TypeError, "train_len must be an integer"),
    "hann": (lambda: ClipHann(0), ValueError, "train_len must be at least 1"),
    "name": (lambda: RoPE(8, scaling="yarn"), TypeError, "scaling must be a Scaling .*'yarn'"),
    "class": (lambda: RoPE(8, scaling=PI), TypeError, "scaling must be a Scaling"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    make, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make()


def test_numbers_of_numpy_and_lists_become_pythons():
    scaling = LongRoPE([np.float32(1), 2.0], np.asarray([1.0, 3.0]), np.int64(64))
    assert scaling == LongRoPE((1.0, 2.0), (1.0, 3.0), 64)
    assert type(scaling.train_len) is int
    assert hash(RoPE(4, scaling=scaling)) == hash(RoPE(4, scaling=scaling))


@dataclass(frozen=True)
class Own(Scaling):
    """A scaling of somebody else's."""

    powers: tuple[float, ...]

    def scaled(self, frequencies, *, base, dim):
        return [float(base) ** -p for p in self.powers]


def test_a_scaling_of_ones_own():
    assert RoPE(4, base=100.0, scaling=Own((0.5, 1.0))).frequencies() == (0.1, 0.01)
    with pytest.raises(ValueError, match=r"Own.scaled must return 2 numbers, got 3"):
        RoPE(4, scaling=Own((1.0, 2.0, 3.0)))


SIZES = {"head_dim": 8, "train_len": 64, "max_len": 256}
BY_NAME = {
    "rope_pi": PI(4.0),
    "rope_ntk": NTK(4.0),
    "rope_ntk_mixed": NTKMixed(4.0),
    "rope_dynamic": DynamicNTK(4.0, 64),
    "rope_yarn": YaRN(4.0, 64),
    "rope_llama3": Llama3(4.0, train_len=64),
    "rope_longrope": LongRoPE((1.0,) * 4, tuple(4 ** (k / 3) for k in range(4)), 64, factor=4.0),
    "p_rope": Proportional(0.75),
    "rope_clip_period": ClipPeriod(64),
    "rope_clip_hann": ClipHann(64),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_name_makes_rope_with_its_scaling(name):
    assert posenc.make(name, **SIZES) == RoPE(8, scaling=BY_NAME[name])
    own = posenc.make(name, **SIZES, base=5e5, layout="interleaved")
    assert own == RoPE(8, base=5e5, layout="interleaved", scaling=BY_NAME[name])
    trained = posenc.catalogue()[name].trained_as
    assert trained == (None if type(BY_NAME[name]).trained else "rope")


def test_options_of_both_classes_by_keyword():
    made = posenc.make("rope_yarn", head_dim=64, factor=4, train_len=4096, base=5e5, ramp="turns")
    assert made == RoPE(64, base=5e5, scaling=YaRN(4, 4096, ramp="turns"))
    assert posenc.make("rope_pi", **SIZES, factor=2) == RoPE(8, scaling=PI(2))
    assert posenc.make("rope_pi", **{**SIZES, "max_len": 32}).scaling.factor == 1
    long = posenc.make("rope_longrope", head_dim=8, rotary_dim=4, train_len=64, factor=9)
    assert long.scaling.long_factor == (1.0, 9.0)
    assert posenc.make("rope_llama3", head_dim=8) == RoPE(8, scaling=Llama3(8, 1, 4, 8192))


def test_what_a_study_tells_is_what_it_makes():
    sizes = {"num_heads": 1, **SIZES}
    for given in ({}, {"factor": 9.0}, {"rotary_dim": 4}):
        told = fitted_options("rope_longrope", {**sizes, **given})
        scaling = posenc.make("rope_longrope", **sizes, **given).scaling
        assert told["long_factor"] == scaling.long_factor


@pytest.mark.parametrize(
    ("name", "given", "error", "message"),
    [
        ("rope_yarn", {"head_dim": 8}, TypeError, r"factor \(or max_len and train_len\) and train"),
        ("rope_pi", {"head_dim": 8, "max_len": 9}, TypeError, "factor .*given: head_dim, max_len"),
        ("rope_longrope", {"head_dim": 8, "train_len": 9}, TypeError, "long_factor .or factor, or"),
        ("rope_pi", {**SIZES, "fctor": 2}, ValueError, "no option 'fctor' .did you mean 'factor'"),
        ("rope_pi", {**SIZES, "scaling": None}, ValueError, "no option 'scaling'"),
    ],
)
def test_what_a_name_lacks_is_named(name, given, error, message):
    with pytest.raises(error, match=message):
        posenc.make(name, **given)


@long  # a compiler is imported
@pytest.mark.skipif(not HAS["torch"], reason="torch is not installed")
def test_compiled_by_torch():
    import array_api_compat.torch as xp
    import torch

    rope = RoPE(8, scaling=YaRN(16, 64, apply_to="angles"))

    def turn(x, pos):
        longer = rope.at_length(4096)
        turned = longer.transform(x, pos, role="query", params={}, xp=xp)
        return longer.scale(8) * turned

    x, pos = torch.ones(3, 8), torch.tensor([0, 5, 2**24])
    compiled = torch.compile(turn, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, pos), turn(x, pos), rtol=0, atol=0)
