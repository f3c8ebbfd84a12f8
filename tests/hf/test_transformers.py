"""``RoPE.from_hf`` beside transformers' own functions: random dictionaries of every type."""

from __future__ import annotations

import copy
import math
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from float32_frequencies import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc.schemes import RoPE
from posenc.testing.tolerances import UNIT

pytestmark = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("torch")), reason="needs transformers and torch"
)

floats, integers = st.floats, st.integers
FACTORS = floats(1, 64).map(lambda x: round(x, 3))
LENGTHS = integers(4, 17).map(lambda n: 2**n)


def optional(draw, options):
    """Some of these options, each drawn if it is there."""
    return {name: draw(values) for name, values in options.items() if draw(st.booleans())}


@st.composite
def cases(draw, kind):
    """``(parameters, head_dim, max_position_embeddings, seq_len)``."""
    head_dim = 2 * draw(integers(2, 64))
    dim = 2 * draw(integers(2, head_dim // 2))
    length, longer = draw(LENGTHS), draw(integers(1, 64))
    given = {"rope_type": kind, "rope_theta": float(round(10 ** draw(floats(2, 8))))}
    if dim < head_dim:
        given["partial_rotary_factor"] = math.nextafter(dim / head_dim, 1)
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        given["factor"] = draw(FACTORS)
    if kind in ("yarn", "llama3", "longrope"):
        given["original_max_position_embeddings"] = length
    if kind == "yarn":
        numbers = floats(0.5, 2)
        given |= optional(draw, {
            "beta_fast": floats(8, 64), "beta_slow": floats(0.5, 2), "attention_factor": numbers,
            "mscale": numbers | st.just(0.0), "mscale_all_dim": numbers | st.just(0.0),
            "truncate": st.booleans(),
        })  # fmt: skip
        if draw(st.booleans()):
            given["factor"] = None
    if kind == "llama3":
        low = draw(floats(0.5, 2))
        given |= {"low_freq_factor": low, "high_freq_factor": low * draw(floats(2, 8))}
    if kind == "longrope":
        divisors = st.lists(floats(1, 64), min_size=dim // 2, max_size=dim // 2)
        given |= {"short_factor": draw(divisors), "long_factor": draw(divisors)}
        given |= optional(draw, {"factor": FACTORS, "attention_factor": floats(0.5, 2)})
    if kind == "proportional":
        given |= optional(draw, {"factor": FACTORS})
    seq_len = draw(st.none() | integers(1, 4 * length * longer))
    return given, head_dim, length * longer, seq_len


def of_transformers(given, head_dim, max_len, seq_len):
    """Inverse frequencies and attention factor of ``ROPE_INIT_FUNCTIONS``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=copy.deepcopy(given), head_dim=head_dim, max_position_embeddings=max_len,
        hidden_size=8 * head_dim, num_attention_heads=8, standardize_rope_params=lambda: None,
    )  # fmt: skip
    found, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, None, seq_len=seq_len)
    return found.double().numpy(), factor


def compare(case):
    given, head_dim, max_len, seq_len = case
    expected, factor = of_transformers(*case)
    rope = RoPE.from_hf(given, head_dim=head_dim, max_position_embeddings=max_len)
    rope = rope.at_length(seq_len or 1)
    found = np.asarray(rope.frequencies())
    # The largest base of a dynamic one: its power D/(D-2) is at most 2.
    growth = max(1, (seq_len or 1) / max_len) * (given.get("factor") or 1)
    error = relative_error(rope.base * growth**2)
    if given["rope_type"] in ("yarn", "llama3"):
        # A blend of f and f/s is off by its weight's error too, which is a part of f, not of f/s.
        # YaRN's weight is a difference of indices over the ramp's width; three roundings, times
        # k / width <= (D/2) / (ln(8/2) D / (2 ln base)) = ln(base) / ln 4. Llama 3's is that of
        # turns, as far off as f is, times high / (high - low) <= 2. Both stay below 3 errors.
        scale = 5 * rope.base ** (-np.arange(0, len(found)) / len(found))
    else:
        scale = found
    np.testing.assert_array_less(np.abs(found - expected), error * scale + 1e-45)
    # Python's floats on both sides: a few roundings of them.
    assert math.isclose(rope.attention_factor, factor, rel_tol=16 * UNIT["float64"])


KINDS = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@pytest.mark.parametrize("kind", KINDS)
def test_random_dictionaries(kind):
    @settings(max_examples=15)
    @given(cases(kind))
    def equal(case):
        compare(case)

    equal()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_dictionaries(kind):
    @settings(max_examples=400)
    @given(cases(kind))
    def equal(case):
        compare(case)

    equal()


def test_every_type_of_transformers_is_known():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert set(ROPE_INIT_FUNCTIONS) == set(KINDS)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_to_hf_is_a_configuration_that_transformers_reads_alike(kind):
    from transformers import LlamaConfig

    @settings(max_examples=20)
    @given(cases(kind))
    def equal(case):
        given, head_dim, max_len, seq_len = case
        rope = RoPE.from_hf(given, head_dim=head_dim, max_position_embeddings=max_len)
        written = LlamaConfig(
            rope_parameters=rope.to_hf(), head_dim=head_dim, max_position_embeddings=max_len
        ).rope_parameters
        compare((written, head_dim, max_len, seq_len))

    equal()
