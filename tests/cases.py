"""The calls of attention on which every path is compared with the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
from subjects import DIM, SUBJECTS, WIDTH, heads, normal, params_of, steers_attention

from posenc.positions import packed

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
# A learned array, gates and a table meet every case; JAX compiles each call for about a second, so
# there the others meet the two cases that have all the rest in them.
THOROUGH = ["alibi-learned", "forgetting", "t5"]


def grid(route):
    """Subjects, cases and dtypes for one path."""
    half = [("everything", "bfloat16")]
    wide = [("causal", "float64"), ("everything", "float64")]
    every = [(case, "float32") for case in CASES]
    if route.framework.name != "jax":
        return [(s, *at) for s in STEERING for at in every + wide + half]
    some = [("causal", "float32"), ("everything", "float32")]
    if route.path == "reference":  # as in the core: its sharing of code is the reason
        return [(s, *some[1]) for s in ONE_OF_EACH]
    pairs = [(s, *at) for s in ONE_OF_EACH for at in some + half]
    pairs += [(s, *at) for s in THOROUGH for at in every + wide[1:] + half]
    return list(dict.fromkeys(pairs))


def tensors_of(scheme, case, seed=0):
    """q, k, v and hidden states x, float64, in values that half precision holds exactly."""
    count = heads(scheme)
    kv = count // 2 if case.grouped and count % 2 == 0 else 1 if case.grouped else count
    return {
        "q": normal((BATCH, count, case.q_len, DIM), seed),
        "k": normal((BATCH, kv, case.k_len, DIM), seed + 1),
        "v": normal((BATCH, kv, case.k_len, DIM), seed + 2),
        "x": normal((BATCH, case.k_len, WIDTH), seed + 3),
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
