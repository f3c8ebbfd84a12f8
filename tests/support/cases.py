"""The calls of attention on which every implementation is compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from subjects import SUBJECTS, heads, normal, params_of, steers_attention

from posenc.positions import packed
from posenc.testing import SchemeCase
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


_POS, _SEG = packed([8, 12])
_SHUFFLED = shuffled(LENGTH, 0)
CASES = {
    "plain": Case(),
    "causal": Case({"causal": True}),
    "window": Case({"causal": True, "window": 5}),
    "window-both-sides": Case({"window": 5}),
    "segments": Case({"causal": True, "q_pos": _POS, "k_pos": _POS, "q_seg": _SEG, "k_seg": _SEG}),
    "shuffled": Case({"causal": True, "q_pos": _SHUFFLED, "k_pos": _SHUFFLED}),
    "grouped": Case({"causal": True}, grouped=True),
    "fewer-queries": Case({"causal": True}, q_len=3),
    "fewer-queries-plain": Case(q_len=3, grouped=True),
    "everything": Case(
        {
            "causal": True,
            "window": 30,
            "scale": 0.5,
            "q_pos": shuffled(27, 1),
            "k_pos": _SHUFFLED,
            "q_seg": np.arange(27) % 4,  # segment 3 has no key: rows that see nothing
            "k_seg": np.stack([np.arange(LENGTH) % 3, np.zeros(LENGTH, int)]),
        },
        q_len=27,
        grouped=True,
    ),
}
STEERING = [name for name, scheme in SUBJECTS.items() if steers_attention(scheme)] + ["nope"]
ONE_OF_EACH = [*{type(SUBJECTS[name]): name for name in STEERING}.values()]
# A learned array, gates and a table: between them they meet every case where time is short.
THOROUGH = ["t5", "forgetting", "alibi-learned"]


def in_turn(names, place):
    """Every third of ``names``, from ``place`` on, and the one that has all the rest in it."""
    return [*dict.fromkeys([*list(names)[place % 3 :: 3], "everything"])]


def grid(route):
    """Subjects, cases and dtypes for one implementation.

    Each subject meets the causal case, the one with everything, and a third of the others; the
    three of ``THOROUGH`` meet all. JAX compiles each call for about a second, and FlexAttention
    without its compiler takes a fifth: there one subject of each class meets the causal case, and
    everything in half precision.
    """
    wide, half = [("everything", "float64")], [("everything", "bfloat16")]
    if (
        route.framework.name == "jax" and route.implementation == "reference"
    ):  # the code of the core
        return [(s, "everything", "float32") for s in ONE_OF_EACH]
    if route.framework.name == "jax" or route.implementation == "flex":
        found = [(s, *at) for s in ONE_OF_EACH for at in [("causal", "float32"), *half]]
        for place, s in enumerate(THOROUGH):
            found += [(s, case, "float32") for case in in_turn(CASES, place)]
            found += [(s, *at) for at in wide + half]
        return list(dict.fromkeys(found))
    found = []
    for place, s in enumerate(STEERING):
        cases = CASES if s in THOROUGH else dict.fromkeys(["causal", *in_turn(CASES, place)])
        found += [(s, case, "float32") for case in cases]
        found += [(s, *at) for at in [("causal", "float64"), *wide, *half]]
    return found


def calls(route):
    """Every call of one implementation, and whether only the long run tries it."""
    soon = grid(route)
    every = [(s, case, "float32") for s in STEERING for case in CASES]
    return [(call, True) for call in soon] + [(c, False) for c in every if c not in soon]


def tensors_of(scheme, case, seed=0):
    """q, k, v and hidden states, float64, in values that half precision holds exactly.

    Those of queries too, where positions may not tell which tokens they are.
    """
    count = heads(scheme)
    kv = count // 2 if case.grouped and count % 2 == 0 else 1 if case.grouped else count
    kv = kv if kv == count or SchemeCase(scheme).shares_keys else count
    hidden = {"x": normal((BATCH, case.k_len, HIDDEN_DIM), seed + 3)}
    if "q_pos" in case.options and "hidden_features" in scheme.hooks():
        hidden["q_x"] = normal((BATCH, case.q_len, HIDDEN_DIM), seed + 4)
    return {
        "q": normal((BATCH, count, case.q_len, HEAD_DIM), seed),
        "k": normal((BATCH, kv, case.k_len, HEAD_DIM), seed + 1),
        "v": normal((BATCH, kv, case.k_len, HEAD_DIM), seed + 2),
        **hidden,
    }


@cache
def expected(subject: str, case: str):
    """The reference in float64: values from NumPy, gradients from torch's autograd if there."""
    from frameworks import HAS, route

    scheme, where = SUBJECTS[subject], CASES[case]
    tensors, params = tensors_of(scheme, where), params_of(scheme)
    wide = {"dtype": "float64", **where.options}
    values = route("numpy", "reference").attend(scheme, tensors, params, **wide)
    if not HAS["torch"]:
        return values, None
    d_out = normal(values.shape, 9)
    return values, route("torch", "reference").gradients(scheme, tensors, params, d_out, **wide)[1]
