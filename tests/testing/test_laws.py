"""What every scheme promises, on the catalogue and on the examples, that is ``SUBJECTS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pytest
from frameworks import FRAMEWORKS, MISSING
from hypothesis import given
from hypothesis import strategies as st
from sample import exhaustive, in_turn, long
from subjects import SUBJECTS, TELLING, from_catalogue, heads, normal

import posenc
from posenc.testing import BrokenLawError, Law, laws, parametrize_laws
from posenc.testing.examples import HEAD_DIM, HEADS
from posenc.testing.tolerances import rounding_bound

# Sums of HEAD_DIM products below 10, two results, each channel turned by sines and cosines of four
# roundings: docs/exactness.md.
SHIFTED = 2 * rounding_bound(8 * HEAD_DIM, 10, "float64")

NAMES = {scheme: name for name, scheme in SUBJECTS.items()}
CATALOGUE = list(from_catalogue())
# One of each kind: a rotation with a bias, an embedding, a table of each token, and as above.
COMPILED = ("t5", "alibi-learned", "fading", "both", "learned", "rope+key-side")
FEWER = ("alibi-learned", "fading", "both")
# Most faults of an implementation break one of these.
CENTRAL = ("implementation_equals_the_reference", "gradients_are_derivatives")
# JAX's ``chunked`` meets every law. What is left to other implementations there is the code of the
# core, and how a mask reaches XLA's own function.
OF_JAX = {
    "reference": CENTRAL,
    "xla": (*CENTRAL, "decoding_equals_prefill", "left_padding_changes_nothing"),
}
# Where a call waits for a compiler, these are for the long part: implementations that do not wait
# meet them in the quick part, and what keeps them is mostly the code of the core.
IN_THE_LONG_PART = (
    "cache_holds_what_is_needed", "implementation_equals_the_reference_in_other_floats",
    "one_token_per_sequence_equals_prefill", "places_default_to_positions",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Which schemes each law is tried with.

    A law of a scheme alone: every scheme of the catalogue, and a share of the examples, so that
    each of them meets ``alone`` such laws. A law of an implementation: the ``TELLING`` schemes, and
    a share of the others, so that each of them meets ``times`` laws of the implementation. Where a
    scheme costs a second or more, the schemes that ``compiled`` names for the law.
    """

    alone: int
    times: int
    compiled: Callable[[Law], tuple[str, ...]]

    def of(self, laws, names):
        """Pairs of a law's full name and a scheme."""
        chosen = set()
        for _, group in groupby(sorted(laws, key=ground), key=ground):
            group = list(group)
            for place, law in enumerate(group):
                chosen |= {(str(law), name) for name in self._of(law, names, place, len(group))}
        return chosen

    def _of(self, law, names, place, places):
        if law.framework is None:
            examples = [name for name in names if name not in CATALOGUE]
            return [*CATALOGUE, *in_turn(examples, place, places, times=self.alone)]
        if waits(law):
            return self.compiled(law)
        # ``array_api_strict`` computes as NumPy does, and refuses what others may not have.
        telling = () if str(law.framework).startswith("strict") else TELLING
        rest = [name for name in names if name not in telling]
        return [*telling, *in_turn(rest, place, places, times=self.times)]


def ground(law):
    """Where a law is tried."""
    return tuple(str(part or "") for part in (law.framework, law.implementation, law.compiler))


def waits(law):
    """Whether a law waits for a compiler, or for FlexAttention without one, most of its time."""
    jax = law.framework is not None and law.framework.name == "jax"
    return jax or law.compiler is not None or law.implementation == "flex"


def of_quick(law):
    """One scheme, so that laws share what they compile; more where faults are seen best."""
    if every_implementation(law) or law.compiler == "inductor":  # half a minute
        return ()
    own = (str(law.framework), law.implementation)
    later = (
        (*IN_THE_LONG_PART, "implementation_takes_all_options")
        if own[1] == "flex"
        else IN_THE_LONG_PART
    )
    if law.name in later:
        return ()
    if own[0] == "jax" and law.name not in OF_JAX.get(own[1], law.name):
        return ()
    if own == ("torch", "flex"):
        return ("alibi",)
    if own == ("jax", "chunked") and law.name == "gradients_are_derivatives":
        return ("alibi-learned",)
    if law.name in CENTRAL and law.implementation not in ("reference", "xla", "chunked"):
        return ("alibi-learned", "t5")
    return ("alibi-learned",)


def of_long(law):
    """Several kinds of schemes under every compiler; most for the laws that show most."""
    if every_implementation(law) or (law.name not in CENTRAL and law.implementation in OF_JAX):
        return ("alibi-learned",)
    return COMPILED if law.name in CENTRAL or law.implementation is None else FEWER


def every_implementation(law):
    """Whether a law compiles all implementations, one after the other."""
    return law.name == "compiled_attention_equals_eager"


ALONE = sum(law.framework is None for law in laws())
QUICK = Sample(alone=ALONE // 3, times=1, compiled=of_quick)
LONG = Sample(alone=ALONE, times=2, compiled=of_long)
SOON = QUICK.of(laws(), tuple(SUBJECTS))
LATER = LONG.of(laws(), tuple(SUBJECTS)) - SOON


@parametrize_laws(SUBJECTS, select=lambda law, scheme: (str(law), NAMES[scheme]) in SOON)
def test_laws(law, scheme):
    law(scheme)


@long
@parametrize_laws(SUBJECTS, select=lambda law, scheme: (str(law), NAMES[scheme]) in LATER)
def test_laws_with_more_schemes(law, scheme):
    law(scheme)


@exhaustive
@pytest.mark.parametrize("law", laws(), ids=str)
def test_laws_with_every_scheme(law):
    broken = []
    for scheme in SUBJECTS.values():
        try:
            law(scheme)
        except NotImplementedError:  # refused: other laws say what must be served
            continue
        except BrokenLawError as error:
            broken.append(str(error))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("sample", [QUICK, LONG], ids=["quick", "long"])
def test_seven_times_more_schemes_take_less_than_seven_times_the_tests(sample):
    now = tuple(SUBJECTS)
    many = (*now, *(f"scheme-{n}" for n in range(6 * len(now))))
    every = laws()
    few = [law for law in every if law.framework is not None and not waits(law)]
    grounds = {ground(law) for law in few}
    added = len(sample.of(every, many)) - len(sample.of(every, now))
    assert added == 6 * len(now) * (sample.alone + sample.times * len(grounds))
    for where in grounds:
        pairs = sample.of([law for law in few if ground(law) == where], many)
        assert {name for _, name in pairs} == set(many)
    assert {name for name, _ in SOON | LATER} == {str(law) for law in every}


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
