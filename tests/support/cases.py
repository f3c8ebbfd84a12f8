"""The calls of attention on which every implementation is compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from subjects import SUBJECTS, heads, normal, params_of, steers_attention

from posenc import Tokens
from posenc.apply.feature_needs import reads_hidden
from posenc.positions import packed
from posenc.testing import AttentionCase, SchemeCase
from posenc.testing.examples import HEAD_DIM, HIDDEN_DIM

BATCH, LENGTH = 2, 20


def shuffled(length, seed):
    """Positions (B, L): every one its own, with gaps, some negative, in any order."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(3 * length)[:length] - length for _ in range(BATCH)])


@dataclass(frozen=True)
class Case:
    """Lengths and keywords of one call; ``group`` query heads share a key head."""

    options: dict = field(default_factory=dict, hash=False)
    q_len: int = LENGTH
    k_len: int = LENGTH
    grouped: bool = False


_SHUFFLED = shuffled(LENGTH, 0)
CASES = {
    "plain": Case(),
    "causal": Case({"causal": True}),
    "window": Case({"causal": True, "window": 5}),
    "window-both-sides": Case({"window": 5}),
    "segments": Case({"causal": True, "tokens": packed([8, 12])}),
    "shuffled": Case({"causal": True, "tokens": Tokens(pos=_SHUFFLED)}),
    "grouped": Case({"causal": True}, grouped=True),
    "fewer-queries": Case({"causal": True}, q_len=3),
    "fewer-queries-plain": Case(q_len=3, grouped=True),
    "everything": Case(
        {
            "causal": True,
            "window": 30,
            "scale": 0.5,
            "tokens": Tokens(
                pos=_SHUFFLED, seg=np.stack([np.arange(LENGTH) % 3, np.zeros(LENGTH, int)])
            ),
            # Segment 3 has no key: rows that see nothing.
            "queries": Tokens(pos=shuffled(27, 1), seg=np.arange(27) % 4),
        },
        q_len=27,
        grouped=True,
    ),
}
STEERING = [name for name, scheme in SUBJECTS.items() if steers_attention(scheme)] + ["nope"]
ONE_OF_EACH = [*{type(SUBJECTS[name]): name for name in STEERING}.values()]
# A learned table, gates and a learned number meet every case; all others meet cases in turn.
THOROUGH = ["t5", "fox", "alibi-learned"]
DTYPES = ["float32", "float64", "bfloat16"]
# JAX compiles each call for a second, and FlexAttention without its compiler takes half of one.
# There these stand for all in the quick part: the three, and what else is served in a way of its
# own.
COSTLY = {
    "chunked": [
        *[("t5", case, "float32") for case in ("everything", "window-both-sides", "shuffled")],
        *[("fox", case, "float32") for case in ("everything", "segments")],
        *[("alibi-learned", case, "float32") for case in ("window", "fewer-queries-plain")],
        ("checkered", "causal", "float32"),
        ("both", "grouped", "float32"),
        ("rope+key-side", "causal", "float32"),
        ("sink", "causal", "float32"),
        ("rerope", "causal", "float32"),
        ("t5", "everything", "float64"),
        ("alibi-learned", "everything", "bfloat16"),
    ],
    "xla": [
        ("t5", "everything", "float32"),
        ("alibi-learned", "everything", "bfloat16"),
        ("both", "grouped", "float32"),
    ],
    "reference": [("alibi-learned", "everything", "float32")],
    "flex": [
        *[("t5", case, "float32") for case in ("everything", "window-both-sides", "shuffled")],
        *[("fox", case, "float32") for case in ("everything", "fewer-queries")],
        *[("alibi-learned", case, "float32") for case in ("segments", "fewer-queries-plain")],
        ("checkered", "causal", "float32"),
        ("both", "grouped", "float32"),
        ("rope+key-side", "causal", "float32"),
        ("sink", "causal", "float32"),
        ("t5", "everything", "bfloat16"),
    ],
}
# Of these, what the quick part leaves to the long one: options that NumPy and the other
# implementations of the same framework meet in it, in a second a call where these take several.
IN_THE_LONG_PART = {
    "chunked": {
        ("t5", "window-both-sides", "float32"), ("t5", "shuffled", "float32"),
        ("t5", "everything", "float64"), ("fox", "segments", "float32"),
        ("alibi-learned", "window", "float32"), ("both", "grouped", "float32"),
        ("sink", "causal", "float32"), ("rerope", "causal", "float32"),
        ("checkered", "causal", "float32"), ("rope+key-side", "causal", "float32"),
        ("alibi-learned", "everything", "bfloat16"),
    },
    "xla": {("both", "grouped", "float32"), ("t5", "everything", "float32")},
    "flex": {
        ("t5", "window-both-sides", "float32"), ("t5", "shuffled", "float32"),
        ("fox", "fewer-queries", "float32"), ("sink", "causal", "float32"),
        ("t5", "everything", "bfloat16"),
    },
}  # fmt: skip


def waits(route, call):
    """Whether a call of ``quick`` is for the long part."""
    return compiles(route) and call in IN_THE_LONG_PART.get(route.implementation, ())


def compiles(route):
    """Whether each call takes about a second, for a compiler or for FlexAttention without one."""
    return route.framework.name == "jax" or route.implementation == "flex"


def quick(route):
    """Subjects, cases and dtypes that one implementation is always tried with.

    Each subject meets the case with everything, in one dtype of three, and one other case: three
    calls more for a scheme that is added. Where each call takes a second, few calls stand for all.
    """
    if compiles(route):
        return COSTLY[route.implementation]
    cases, calls = list(CASES), [(s, case, "float32") for s in THOROUGH for case in CASES]
    for place, s in enumerate(STEERING):
        calls += [(s, "everything", "float32"), (s, "everything", DTYPES[place % 3])]
        calls += [(s, cases[place % len(cases)], "float32")]
    return list(dict.fromkeys(calls))


def longer(route):
    """What the long part adds: one subject of each class, where each call takes a second."""
    if not compiles(route):
        calls = [(s, case, "float32") for s in ONE_OF_EACH for case in ("causal", "shuffled")]
        calls += [(s, "everything", dtype) for s in STEERING for dtype in DTYPES]
    elif route.implementation == "reference":  # the code of the core
        calls = [(s, "everything", "float32") for s in THOROUGH]
    else:
        at = [("causal", "float32"), ("everything", "bfloat16")]
        # XLA's own function gets a bias that the core has computed, whatever the scheme.
        each = [] if route.implementation == "xla" else ONE_OF_EACH
        calls = [(s, *at[place % 2]) for place, s in enumerate(each)]
        calls += [(s, case, "float32") for s in THOROUGH for case in CASES]
        calls += [(s, "everything", dtype) for s in THOROUGH for dtype in DTYPES]
    soon = quick(route)
    return [call for call in dict.fromkeys(calls) if call not in soon]


def tensors_of(scheme, case, seed=0):
    """q, k and v, float64, in values that half precision holds exactly."""
    count = heads(scheme)
    kv = count // 2 if case.grouped and count % 2 == 0 else 1 if case.grouped else count
    kv = kv if kv == count or SchemeCase(scheme).shares_keys else count
    return {
        "q": normal((BATCH, count, case.q_len, HEAD_DIM), seed),
        "k": normal((BATCH, kv, case.k_len, HEAD_DIM), seed + 1),
        "v": normal((BATCH, kv, case.k_len, HEAD_DIM), seed + 2),
    }


def options_of(scheme, case, seed=0):
    """The keywords of a case, in which tokens have hidden states, for any scheme.

    Queries that are other tokens have their own, if the scheme reads them.
    """
    x = normal((BATCH, case.k_len, HIDDEN_DIM), seed + 3)
    options = {**case.options, "tokens": replace(case.options.get("tokens", Tokens()), x=x)}
    if "queries" in options and reads_hidden(scheme):
        x = normal((BATCH, case.q_len, HIDDEN_DIM), seed + 4)
        options["queries"] = replace(options["queries"], x=x)
    return options


def case_of(scheme, case):
    """The call of a case with a scheme and its first params."""
    given = tensors_of(scheme, case), params_of(scheme), options_of(scheme, case)
    return AttentionCase(scheme, *given)


def widens(scheme):
    """Whether queries get more channels than values have."""
    case, x = SchemeCase(scheme), np.ones((1, heads(scheme), 1, HEAD_DIM))
    return case.transform(x, case.tokens(np.zeros(1, int), "query")).shape[-1] > HEAD_DIM


@cache
def expected(subject: str, case: str):
    """The reference in float64: values from NumPy, gradients from torch's autograd if there."""
    from frameworks import HAS, route

    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    wide = {"dtype": "float64", **options_of(scheme, where)}
    values = route("numpy", "reference").attend(scheme, tensors, params, **wide)
    if not HAS["torch"]:
        return values, None
    d_out = normal(values.shape, 9)
    return values, route("torch", "reference").gradients(scheme, tensors, params, d_out, **wide)[1]
