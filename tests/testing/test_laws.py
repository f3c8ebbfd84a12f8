"""What every scheme promises, on the catalogue and on the examples, that is ``SUBJECTS``."""

from __future__ import annotations

import numpy as np
import pytest
from faults import FAULTS
from frameworks import FRAMEWORKS, MISSING
from hypothesis import given
from hypothesis import strategies as st
from subjects import SUBJECTS, heads, normal

import posenc
from posenc.testing import laws, parametrize_laws
from posenc.testing.examples import HEAD_DIM, HEADS
from posenc.testing.tolerances import rounding_bound

# Sums of HEAD_DIM products below 10, two results, each channel turned by sines and cosines of four
# roundings: docs/exactness.md.
SHIFTED = 2 * rounding_bound(8 * HEAD_DIM, 10, "float64")


def kind(scheme):
    """The class of a scheme, and those of its parts."""
    parts = getattr(scheme, "schemes", ()) or (getattr(scheme, "scheme", None),)
    return (type(scheme), *map(type, parts))


# Every scheme meets every law on NumPy; elsewhere one of each class does.
FIRST = list({kind(scheme): scheme for scheme in reversed(SUBJECTS.values())}.values())
# A compiler takes a second for each function: sums, a rotation with a bias, a table, a learned
# number, a table of each token meet it here, every other scheme in the long run.
COMPILED = [
    SUBJECTS[name] for name in ("fading", "both", "t5", "alibi-learned", "learned", "rope+key-side")
]
# A law that compiles every implementation, or what another law compiled with other numbers: sums,
# a number.
AGAIN = [SUBJECTS[name] for name in ("fading", "alibi-learned")]


def waits(law):
    """Whether a law waits for a compiler most of its time."""
    return law.compiler is not None or (law.framework is not None and law.framework.name == "jax")


def repeats(law):
    """Whether it compiles what other laws do, or all implementations at once."""
    every_implementation = law.compiler is not None and "attention" in law.name
    same_calls = law.implementation is not None and law.check.__module__.endswith(".equivalence")
    return every_implementation or same_calls or law.implementation == "reference"


NAMES = {scheme: name for name, scheme in SUBJECTS.items()}
# What a planted fault is known by is tried each time.
KNOWN_BY = [
    words
    for fault in FAULTS
    for file, *words in map(str.split, fault.tests)
    if file == "test_laws.py"
]


def soon(law, scheme):
    """Whether a law is tried on a scheme each time, not in the long run alone."""
    name = f"{law}-{NAMES[scheme]}"
    if any(all(word in name for word in words) for words in KNOWN_BY):
        return True
    if waits(law):
        return scheme in (AGAIN if repeats(law) else COMPILED)
    if law.framework is None or law.framework.name == "numpy":
        return True
    if law.implementation == "flex" and "callers_bring" in law.name:
        return scheme in AGAIN  # some thirty calls, each a fifth of a second
    if law.implementation == "flex" and law.name not in (
        "implementation_equals_the_reference",
        "decoding_equals_prefill",
    ):
        return scheme in COMPILED
    return scheme in FIRST or (law.implementation != "flex" and scheme in COMPILED)


@parametrize_laws(SUBJECTS, select=soon)
def test_laws(law, scheme):
    law(scheme)


@pytest.mark.long
@parametrize_laws(SUBJECTS, select=lambda law, scheme: not soon(law, scheme))
def test_laws_in_the_long_run(law, scheme):
    law(scheme)


@pytest.mark.parametrize("name", [*FRAMEWORKS, *MISSING])
def test_laws_are_tried_on_every_framework(name):
    own = [law for law in laws([name]) if law.framework is not None]
    assert {law.implementation for law in own} >= set(FRAMEWORKS[name].implementations)
    assert {law.compiler for law in own} >= set(FRAMEWORKS[name].compilers)


def test_different_schemes_are_unequal():
    assert len(set(SUBJECTS.values())) == len(SUBJECTS)
    assert {heads(s) for s in SUBJECTS.values()} >= {HEADS}


@pytest.mark.parametrize("pair", ["rope", "rope-interleaved", "rope-partial", "rope-base", "both"])
@given(data=st.data())
def test_rotated_scores_depend_on_the_difference_alone(pair, data):
    scheme = SUBJECTS[pair]
    steps = st.integers(-(2**20), 2**20)
    i, j, by = data.draw(steps), data.draw(steps), data.draw(steps)
    q, k = normal((1, HEAD_DIM), 4), normal((1, HEAD_DIM), 5)

    def score(i, j):
        turned = posenc.transform(scheme, q, np.asarray([i]), role="query")
        return turned @ posenc.transform(scheme, k, np.asarray([j]), role="key").T

    np.testing.assert_allclose(score(i, j), score(i + by, j + by), rtol=0, atol=SHIFTED)
