"""What schemes of the catalogue must answer, by their papers' formulas in mpmath; and how far an
answer is from it.

An oracle uses nothing of posenc but the fields of a scheme. A scheme without one has its golden
numbers in ``tests/schemes``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from typing import Any, NamedTuple

import mpmath
import numpy as np

import posenc
import posenc.schemes
from posenc.schemes import (
    BAM,
    FIRE,
    NTK,
    PI,
    CARoPE,
    ClipHann,
    ClipPeriod,
    DynamicNTK,
    FoPE,
    Kerple,
    Llama3,
    LogScale,
    LongRoPE,
    NTKMixed,
    PoPE,
    Proportional,
    RelativeTable,
    RePo,
    Sandwich,
    Wavelet,
    XPos,
    YaRN,
)
from posenc.testing.framework import Framework, frameworks

RANGES = (2**7, 2**12, 2**17, 2**20, 2**24)
DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # of a significand
HALVES = ("float16", "bfloat16")
LENGTH = 240  # positions in a range
SMALLEST = {"float16": 2.0**-24}  # steps never get finer; in other dtypes that is out of sight
LARGEST = {"float16": 65504.0}
MP = mpmath.mp.clone()
MP.dps = 50  # 2**24 turns take 8 digits, float64 takes 17

# What posenc promises, in the units of Case.measure. Correct rounding is off by 0.5.
LIMITS = {
    # An angle of at most pi/4 that has been rounded three times, 1.3 together, of which a sine or
    # cosine there sees 0.9; a library's own sine, 1; where RoPE turns any vectors, products and
    # their sum, 1.5. In float32 that is 2**-22, in float64 2**-51. Halves are one rounding of
    # float32: 0.5, and 2**-13 of its 4.
    "bounded": {"float64": 4.0, "float32": 4.0, "float16": 0.501, "bfloat16": 0.501},
    # Slope, distance (in float32 beyond 2**24) and product are rounded once each: less than 2.
    "ulp": {"float64": 2.0, "float32": 2.0, "float16": 0.501, "bfloat16": 0.501},
    # A gate: exp and log1p 1 each, with the argument of log1p and a difference 2.5 together, of
    # exact logits. A sum of 16 gates is rounded 15 times, each at most by half a spacing of it,
    # and a spacing is between 1 and 2 roundings of a number: 15 + 5.
    "sum": {"float64": 20.0, "float32": 20.0, "float16": 0.51, "bfloat16": 0.501},
    # As above, and a library's own logarithm or power, of at most 2.
    "elementary": {"float64": 4.0, "float32": 4.0, "float16": 0.501, "bfloat16": 0.501},
    # Up to 5 of each term, and 8 sums.
    "largest": {"float64": 13.0, "float32": 13.0, "float16": 0.502, "bfloat16": 0.501},
    # Nothing is computed, and a bucket is a whole number.
    "copy": {"float64": 0.0, "float32": 0.0, "float16": 0.0, "bfloat16": 0.0},
}

Call = Callable[[Any, Mapping[str, Any], Any], Any]


def reaching(reach: int) -> np.ndarray:
    """Positions up to ``reach``, of both signs: where floats and integers change, and random."""
    powers = 2 ** np.arange(reach.bit_length())
    edges = np.unique([powers - 1, powers, powers + 1])
    edges = edges[edges <= reach]
    rng = np.random.default_rng(reach)
    left = LENGTH - 2 * len(edges)
    even = rng.integers(-reach, reach, left // 2, endpoint=True)
    near = np.rint(reach ** rng.random(left - left // 2)).astype(int)
    return np.concatenate([edges, -edges, even, near * rng.choice([-1, 1], len(near))])


def keys_reaching(reach: int) -> np.ndarray:
    """The keys that those positions look at: at the ends, so that distances reach ``2 * reach``."""
    return np.asarray([0, 1, -1, reach, -reach, reach - 1, -(reach // 2) - 1, reach // 3])


# (ranges, positions): a range is a row of a batch, so that one program serves all of them.
POSITIONS = {
    "pos": np.stack([reaching(reach) for reach in RANGES]),
    "k_pos": np.stack([keys_reaching(reach) for reach in RANGES]),
}
POSITIONS["row"] = np.abs(POSITIONS["pos"])  # a learned table begins at 0


@cache
def frequency(base: float, exponent: Fraction) -> Any:
    """``base ** -exponent``, radians a position."""
    return MP.power(base, -MP.mpf(exponent.numerator) / exponent.denominator)


@cache
def sine(pos: int, f: Any) -> Any:
    """``sin(pos * f)``."""
    return MP.sin(pos * f)


@cache
def cosine(pos: int, f: Any) -> Any:
    """``cos(pos * f)``."""
    return MP.cos(pos * f)


def each(function: Callable[..., Any], *arguments: Any) -> np.ndarray:
    """``function`` of every element of what is broadcast, as Python objects."""
    objects = [np.asarray(a, dtype=object) for a in arguments]
    return np.frompyfunc(function, len(objects), 1)(*objects)


def alibi(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``-m |q - k|``, ``m = 2**(-8h/P)``, then odd steps of ``2P`` (Press et al., section 3)."""
    heads = scheme.num_heads
    power = 2 ** int(np.log2(heads)) if scheme.slopes == "paper" else heads
    exponents = [Fraction(8 * h, power) for h in range(1, power + 1)]
    exponents += [Fraction(8 * h, 2 * power) for h in range(1, 2 * (heads - power), 2)]
    slopes = np.asarray([frequency(2, e) for e in exponents], dtype=object)
    distance = np.abs(given["pos"][:, :, None] - given["k_pos"][:, None, :])
    return -slopes[:, None, None] * distance.astype(object)[:, None]


def distances(given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``|q - k|``, ``(ranges, 1, Q, K)``, as Python integers."""
    return np.abs(given["pos"][:, None, :, None] - given["k_pos"][:, None, None, :]).astype(object)


def kerple(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``-p ln(1 + a |q - k|)``, or ``-a |q - k|**p`` (Chi et al., section 4)."""
    p, a = ([MP.mpf(float(value)) for value in given[name]] for name in ("p", "a"))
    n = np.broadcast_to(distances(given), (len(RANGES), len(p), LENGTH, given["k_pos"].shape[1]))

    @cache
    def bias(head: int, n: int) -> Any:
        if scheme.kind == "log":
            return -p[head] * MP.log1p(a[head] * n)
        return -a[head] * MP.power(n, p[head])

    return each(bias, np.arange(len(p))[:, None, None], n)


def bam(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``-(e^s |q - k| + 1e-5)**beta``, or ``e^s`` outside the power (Bianchessi et al.)."""
    s, beta = ([MP.mpf(float(value)) for value in given[name]] for name in ("s", "beta"))
    n = np.broadcast_to(distances(given), (len(RANGES), len(s), LENGTH, given["k_pos"].shape[1]))

    @cache
    def bias(head: int, n: int) -> Any:
        inside, outside = (
            (1, MP.exp(s[head])) if scheme.slope == "outside" else (MP.exp(s[head]), 1)
        )
        return -outside * MP.power(inside * n + MP.mpf("1e-5"), beta[head])

    return each(bias, np.arange(len(s))[:, None, None], n)


def sandwich(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``H / (8 h) sum cos(n / base**(2k/d))`` (Chi et al., appendix E)."""
    d, heads = scheme.dim, scheme.num_heads

    @cache
    def total(n: int) -> Any:
        return MP.fsum(cosine(n, frequency(scheme.base, Fraction(2 * k, d))) for k in range(d // 2))

    strength = [MP.mpf(heads) / (8 * h) for h in range(1, heads + 1)]
    return np.asarray(strength, dtype=object)[:, None, None] * each(total, distances(given))


def relative_table(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """The table's entry (Shaw et al., section 3.2)."""
    K, rel = scheme.max_distance, given["k_pos"][:, None, :] - given["pos"][:, :, None]
    row = np.clip(rel, -K, K) + K if scheme.bidirectional else np.clip(-rel, 0, K)
    return np.swapaxes(given["table"][:, row], 0, 1)


def fire(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``w2 relu(w1 x + b1)``, ``x = psi(|q - k|) / (psi(max(q, L)) + 1e-6)`` (Li et al.)."""
    c, scale = (abs(MP.mpf(float(given[name]))) for name in ("c", "len_scale"))
    w1, b1, w2 = ([MP.mpf(float(w)) for w in given[n].ravel()] for n in ("w1", "b1", "w2"))
    length = scale * MP.mpf(scheme.init_len)

    @cache
    def psi(x: Any) -> Any:
        return MP.log1p(c * x)

    def bias(n: int, q: int) -> Any:
        x = psi(n) / (psi(max(MP.mpf(q), length)) + MP.mpf("1e-6"))
        units = (max(MP.mpf(0), w * x + b) for w, b in zip(w1, b1, strict=True))
        return MP.fsum(w * unit for w, unit in zip(w2, units, strict=True))

    return each(bias, distances(given), given["pos"].astype(object)[:, None, :, None])


def t5(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """The table's entry; ``floor(w ln(n/E) / ln(M/E)) >= t`` iff ``(n/E)**w >= (M/E)**t``."""
    size = scheme.num_buckets // (1 if scheme.causal else 2)
    E, M, w = size // 2, scheme.max_distance, size - size // 2

    @cache
    def bucket(rel: int) -> int:
        n = max(-rel, 0) if scheme.causal else abs(rel)
        later = 0 if scheme.causal or rel <= 0 else size
        wider = sum(n**w * E**t >= E**w * M**t for t in range(1, w))
        return later + (n if n < E else E + wider)

    rel = given["k_pos"][:, None, :] - given["pos"][:, :, None]
    return np.swapaxes(given["table"][:, each(bucket, rel).astype(int)], 0, 1)


def rope(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Pairs ``(a, b)`` turned by ``pos * base**(-2k/R)`` (Su et al., equation 34), or scaled."""
    R = scheme.rotary_dim or scheme.head_dim
    half = np.arange(R // 2)
    pairs = {"half": (half, half + R // 2), "interleaved": (2 * half, 2 * half + 1)}
    first, second = pairs[scheme.layout]
    f, factor = scaled(scheme.scaling, scheme.base, R)
    turn = (given["pos"][..., None], f)
    cos, sin = factor * each(cosine, *turn), factor * each(sine, *turn)
    x = given["x"].astype(object)
    a, b, out = x[..., first], x[..., second], x.copy()
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def scaled(scaling: Any, base: float, R: int) -> tuple[list[Any], Any]:
    """The frequencies of RoPE for ``R`` channels under a scaling, and the factor of its cosines."""
    n = R // 2
    f = [frequency(base, Fraction(2 * k, R)) for k in range(n)]
    if scaling is None:
        return f, 1
    kind, s = type(scaling).__name__, MP.mpf(getattr(scaling, "factor", None) or 1)
    L0, factor = getattr(scaling, "train_len", None), MP.mpf(1)
    period = [2 * MP.pi / each for each in f]
    if kind == "PI":  # Chen et al., equation 4
        f = [each / s for each in f]
    elif kind in ("NTK", "DynamicNTK"):  # a larger base
        if kind == "DynamicNTK":
            s = s * max(scaling.length or 0, L0) / L0 - (s - 1)
        larger = base * s ** (MP.mpf(R) / (R - 2))
        f = [frequency(larger, Fraction(2 * k, R)) for k in range(n)]
    elif kind == "NTKMixed":  # Su's code
        a = MP.log(s) / MP.mpf(n) ** 0.75
        f = [each * MP.exp(-a * MP.mpf(k) ** 0.75) for k, each in enumerate(f, 1)]
    elif kind == "YaRN":  # Peng et al., equations 13 and 15, and the released ramp
        factor, ramp = MP.log(s) / 10 + 1, []
        fast, slow = scaling.beta_fast, scaling.beta_slow
        if scaling.ramp == "turns":
            ramp = [1 - (L0 / each - slow) / (fast - slow) for each in period]
        else:
            ends = [R * MP.log(L0 / (r * 2 * MP.pi)) / (2 * MP.log(base)) for r in (fast, slow)]
            if scaling.truncate:
                ends = [MP.floor(ends[0]), MP.ceil(ends[1])]
            low, high = max(ends[0], 0), min(ends[1], R - 1)
            ramp = [(k - low) / (high - low) for k in range(n)]
        ramp = [min(max(each, 0), 1) for each in ramp]
        f = [each / s * r + each * (1 - r) for each, r in zip(f, ramp, strict=True)]
    elif kind == "LongRoPE":
        factor = MP.sqrt(1 + MP.log(s) / MP.log(L0))
        long = (scaling.length or 0) > L0
        divisors = scaling.long_factor if long else scaling.short_factor
        f = [each / d for each, d in zip(f, divisors, strict=True)]
    elif kind == "Llama3":  # Meta's code
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        for k, w in enumerate(period):
            t = (L0 / w - low) / MP.mpf(high - low)
            blended = (1 - t) * f[k] / s + t * f[k]
            f[k] = f[k] / s if w > L0 / low else f[k] if w < L0 / high else blended
    elif kind == "Proportional":  # Barbero et al., section 6
        f = [each / s if k < int(scaling.p * R // 2) else MP.mpf(0) for k, each in enumerate(f)]
    elif kind == "ClipPeriod":
        f = [MP.mpf(0) if w > L0 else each for each, w in zip(f, period, strict=True)]
    elif kind == "ClipHann":
        first = next(k for k, w in enumerate(period) if w > L0)
        for k in range(first, n):
            f[k] *= (1 + MP.cos(MP.pi * (k - first) / (n - 1 - first))) / 2
    else:
        raise ValueError(f"no oracle for {scaling}")
    return f, factor


def xpos(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """As RoPE, pair ``k`` of a query times ``zeta_k**(pos/s)`` (Sun et al., algorithm 1)."""
    D = scheme.head_dim
    zeta = [(MP.mpf(2 * k) + MP.mpf(2) / 5 * D) / (MP.mpf(7) / 5 * D) for k in range(D // 2)]

    @cache  # both of a pair
    def factor(pos: int, zeta: Any) -> Any:
        return MP.power(zeta, MP.mpf(pos) / MP.mpf(scheme.scale_base))

    turned = posenc.RoPE(D, scheme.base, scheme.layout)
    return rope(turned, given) * each(factor, given["pos"][..., None].astype(object), zeta * 2)


def pope(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``softplus(x)`` times cosine and sine of ``pos * base**(-c/D)`` (equation 6)."""
    D = scheme.head_dim
    turn = given["pos"][..., None], [frequency(scheme.base, Fraction(c, D)) for c in range(D)]
    length = each(lambda x: MP.log1p(MP.exp(MP.mpf(x))), given["x"])
    return np.concatenate([length * each(cosine, *turn), length * each(sine, *turn)], axis=-1)


def fope(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Pairs turned by mixtures of the sines and cosines with a turn in training (Hua et al.)."""
    D, H = scheme.head_dim, scheme.num_heads
    f = [frequency(scheme.base, Fraction(2 * k, D)) for k in range(D // 2)]
    f = [each for each in f if each * scheme.train_len >= 2 * MP.pi]
    n, m = len(f), min(len(f), D // 4)
    rng, identity = np.random.default_rng(scheme.seed), np.zeros((n, m))
    identity[np.arange(m) * -(-n // m), np.arange(m)] = 1
    deviation = scheme.gain * np.sqrt(2 / (n * m + H * m))
    coef = [identity + deviation * rng.standard_normal((H, n, m)) for _ in "sc"]
    x, pos = given["x"].astype(object), given["pos"][:, None, :, None]
    sin, cos = (
        np.einsum("...n,hnm->...hm", each(function, pos, f)[:, 0], matrix.astype(object))
        for function, matrix in zip((sine, cosine), coef, strict=True)
    )
    sin, cos = np.swapaxes(sin, 1, 2), np.swapaxes(cos, 1, 2)
    a, b, out = x[..., :m], x[..., D // 2 : D // 2 + m], x.copy()
    out[..., :m], out[..., D // 2 : D // 2 + m] = a * cos - b * sin, a * sin + b * cos
    return out


def repo(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Positions ``final_map (swish(gate_map x) * content_map x)`` (Li et al., section 3.2)."""
    x, gate, content, final = (
        each(lambda v: MP.mpf(float(v)), given[name])
        for name in ("x", "gate_map", "content_map", "final_map")
    )
    swish = each(lambda v: v / (1 + MP.exp(-v)), x @ gate.T)
    return np.swapaxes((swish * (x @ content.T)) @ final.T, 1, 2)


def carope(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums of ``f**k``, ``f = 1 / (ln(1 + exp(w.x + b)) + 1)``, ``k`` from 1 (Veisi et al.)."""
    z = given["x"].astype(object) @ given["w"].T.astype(object) + given["b"].astype(object)
    f = each(lambda z: 1 / (MP.log1p(MP.exp(MP.mpf(z))) + 1), np.swapaxes(z, 1, 2))
    powers = each(lambda f, k: f**k, f[..., None], np.arange(1, scheme.head_dim // 2 + 1))
    return np.cumsum(powers, axis=2)


def log_scale(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """The factor of each position (the models' own code; Nakanishi)."""
    L, s = scheme.train_len, given.get("s", [1])

    def factor(p: int, s: Any) -> Any:
        p = max(p, 0)
        return {
            "llama4": lambda: 1 + MP.log1p((p + 1) // L) / 10,
            "ministral3": lambda: 1 + MP.log1p(p // L) / 10,
            "inkling": lambda: 1 + max(MP.mpf(0), MP.log(MP.mpf(p + 1) / L)) / 10,
            "rerope": lambda: max(MP.mpf(1), MP.log(p + 1) / MP.log(L)),
            "ssmax": lambda: MP.mpf(float(s)) * MP.log(p + 1),
        }[scheme.kind]()

    heads = np.asarray(s, dtype=object)[:, None, None]
    return each(factor, given["pos"][:, None, :, None].astype(object), heads)


def sinusoidal(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``sin`` and ``cos`` of ``pos * base**(-2k/d)`` (Vaswani et al., section 3.5)."""
    n = scheme.dim // 2
    steps = n - 1 if scheme.layout == "tensor2tensor" else n
    f = [frequency(scheme.base, Fraction(k, steps)) for k in range(n)]
    both = [each(function, given["pos"][..., None], f) for function in (sine, cosine)]
    if scheme.layout == "interleaved":
        return np.stack(both, axis=-1).reshape(*given["pos"].shape, scheme.dim)
    return np.concatenate(both, axis=-1)


def learned(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Row ``pos + offset`` of the table (Gehring et al., section 3.1)."""
    return given["table"][given["row"] + scheme.offset]


def nope(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """What came in (Kazemnejad et al.)."""
    return given["x"]


def gate_sums(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums of ``-ln(1 + exp(-z))``, ``z = w.x + b`` (Lin et al.), or ``-(w.x + b)`` (Veisi)."""
    sign = -1 if isinstance(scheme, posenc.schemes.CABLE) else 1
    z = given["x"].astype(object) @ given["w"].T.astype(object) + given["b"].astype(object)
    gates = each(lambda z: -MP.log1p(MP.exp(-sign * MP.mpf(z))), z)
    return np.swapaxes(np.cumsum(gates, axis=1), 1, 2)


def wall(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Sums of ``-ln(1 + exp(-z))``, ``z = w.x + offset``, of each channel (Pai et al.)."""
    w, x = given["w"].astype(object), given["x"][:, None].astype(object)
    gates = each(lambda z: -MP.log1p(MP.exp(-MP.mpf(z))), x @ w.swapaxes(1, 2) + scheme.offset)
    return np.cumsum(gates, axis=2)


def grape_a(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``ln(1 + exp(u.k / (|u| sqrt(D))))`` of each key (Zhang et al., the additive form)."""
    u = np.asarray([[MP.mpf(float(n)) / MP.norm(list(map(float, row))) for n in row]
                    for row in given["u"]], dtype=object)  # fmt: skip
    z = (given["k"].astype(object) * u[:, None]).sum(axis=-1) / MP.sqrt(scheme.head_dim)
    return each(lambda z: MP.log1p(MP.exp(z)), z)


def grape_ap(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``p = w.x`` by the root of its mean square, with ``2**-23`` in it (Zhang et al., paths)."""
    p = given["x"][:, None].astype(object) @ given["w"].swapaxes(1, 2).astype(object)
    squares = (p * p).sum(axis=-1, keepdims=True) / MP.mpf(p.shape[-1]) + MP.mpf(2) ** -23
    return p / each(MP.sqrt, squares)


def wavelet(scheme: Any, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """``q.p_n / sqrt(D)``, with wavelets ``p_n`` of scales ``a`` and shifts ``b`` (Oka et al.)."""
    shifts = scheme.head_dim // scheme.scales
    a = [MP.mpf(scheme.min_scale) * 2**n for n in range(scheme.scales)]
    last = scheme.max_distance
    n = range(-last if scheme.bidirectional else 0, last + 1)
    t = np.asarray([[(m - b) / scale for m in n] for scale in a for b in range(shifts)], object)
    ricker = scheme.wavelet == "ricker"
    p = each(lambda t: (1 - t * t) * MP.exp(-t * t / 2) if ricker else MP.exp(-t * t), t)
    return given["k"].astype(object) @ p / MP.sqrt(scheme.head_dim)


@dataclass(frozen=True, eq=False)
class Case:
    """A scheme with options, what it is asked, and its oracle.

    Parameters
    ----------
    kind, option
        Its name in the catalogue, and what its options are.
    scheme, oracle
        The scheme, and what it must answer.
    place
        ``"bias"``, ``"transform"``, ``"embedding"``, or ``"feature NAME"``: of keys, as sums of
        gates, of which a bias is the difference, or of queries, as a bias of each distance.
    measure
        ``"bounded"``: values up to 1, and errors in spacings of the numbers in [1/2, 1).
        ``"largest"``: the same in spacings at the largest value. ``"ulp"``, ``"elementary"``,
        ``"sum"``: errors in spacings of the numbers at each value, rounded. ``"copy"``: how many
        values are not exactly what they should be.
    own
        Arrays besides positions: ``x`` and ``k``, which every dtype holds, or a float32 ``table``.
    """

    kind: str
    option: str
    scheme: Any
    oracle: Callable[..., np.ndarray]
    place: str
    measure: str
    own: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}, {self.option}" if self.option else self.kind

    def answer(self, xp: Any, arrays: Mapping[str, Any], own: Mapping[str, Any], dtype: Any) -> Any:
        """What posenc says, ``(ranges, ...)``."""
        if self.place == "transform":
            params = {name: own[name] for name in self.scheme.param_specs()}
            given = self.scheme, own["x"], arrays["pos"]
            return posenc.transform(*given, role="query", params=params, xp=xp)
        if self.place.startswith("feature "):
            learned = {name: own[name] for name in self.scheme.param_specs()}
            tokens, vectors = posenc.Tokens(x=own.get("x")), {n: own.get("k") for n in "qk"}
            sides = posenc.features(self.scheme, learned, tokens, **vectors, xp=xp)
            name = self.place.removeprefix("feature ")
            side = next(side for side in sides if name in side.features)
            return xp.astype(side.features[name], dtype)
        if self.place == "bias":
            pair = arrays["pos"], arrays["k_pos"]
            return posenc.bias(self.scheme, *pair, own, dtype=dtype, xp=xp)
        return posenc.embedding(self.scheme, arrays["row" if own else "pos"], own, dtype=dtype)

    @cached_property
    def exact(self) -> Exact:
        """What it must say."""
        values = self.oracle(self.scheme, {**POSITIONS, **self.own})
        high = values.astype(float)
        return Exact(high, (values - high).astype(float))


class Exact(NamedTuple):
    """Numbers of some 100 bits: a float64 and what it lacks."""

    high: np.ndarray
    low: np.ndarray

    def rounded(self, dtype: str) -> np.ndarray:
        """The nearest numbers of ``dtype``, ties to even, as float64."""
        if dtype == "float64":
            return self.high
        # Rounded to odd before, so that the next rounding takes for a tie only what is one.
        even = (self.high.view(np.int64) & 1 == 0) & (self.low != 0)
        odd = np.where(even, np.nextafter(self.high, np.copysign(np.inf, self.low)), self.high)
        unit = ulp(odd, dtype)
        near = np.rint(odd / unit) * unit
        beyond = np.abs(near) > LARGEST.get(dtype, np.inf)
        return np.where(beyond, np.copysign(np.inf, near), near)

    def away(self, found: np.ndarray) -> np.ndarray:
        """How far ``found`` is from these numbers; infinite for what is no number."""
        with np.errstate(invalid="ignore"):
            far = np.abs((found - self.high) - self.low)
        return np.where(np.isnan(far), np.inf, far)


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """The spacing of the numbers of ``dtype`` at ``values``."""
    step = np.ldexp(1.0, np.frexp(values)[1] - DIGITS[dtype])
    return np.maximum(step, SMALLEST.get(dtype, 0))


def errors(case: Case, found: np.ndarray, dtype: str) -> np.ndarray:
    """The worst error of each range, in the units of the case."""
    exact = case.exact
    if case.measure in ("bounded", "largest"):
        size = 1 if case.measure == "bounded" else np.exp2(np.frexp(np.abs(exact.high).max())[1])
        error = exact.away(found) / (size * 2.0 ** -DIGITS[dtype])
    else:
        nearest = exact.rounded(dtype)
        if case.measure == "copy":
            return np.sum((found != nearest).reshape(len(RANGES), -1), axis=1)
        finite = np.where(np.isfinite(nearest), nearest, 1)
        error = np.where(found == nearest, 0, np.inf)  # where a bias has left float16
        error = np.where(np.isfinite(nearest), exact.away(found) / ulp(finite, dtype), error)
    return np.max(error.reshape(len(RANGES), -1), axis=1)


def options(
    kind: str,
    oracle: Callable[..., np.ndarray],
    place: str,
    measure: str,
    schemes: Mapping[str, Any],
    own: Callable[[Any], Mapping[str, np.ndarray]] = lambda scheme: {},
) -> list[Case]:
    """A case of each of a scheme's options."""
    return [
        Case(kind, option, scheme, oracle, place, measure, own(scheme))
        for option, scheme in schemes.items()
    ]


def ones(scheme: Any) -> np.ndarray:
    """Pairs ``(1, 0)``, of which rotation makes ``(cos, sin)``; 0.75 where nothing turns."""
    R = scheme.rotary_dim or scheme.head_dim
    x = np.full((len(RANGES), LENGTH, scheme.head_dim), 0.75)
    x[..., :R] = np.arange(R) < R // 2 if scheme.layout == "half" else np.arange(R) % 2 == 0
    return x


_rng = np.random.default_rng(0)
# Eight bits, which all dtypes hold, and no pair of channels longer than 1.
VECTORS = _rng.integers(-90, 91, (len(RANGES), LENGTH, 32)) / 128
ROWS = _rng.random((RANGES[-1] + 3, 1), dtype=np.float32)
# Distinct in every dtype, so that a wrong bucket is a wrong value.
BUCKETS = (np.arange(1, 65) + _rng.uniform(-0.2, 0.2, 64)).astype(np.float32).reshape(2, 32)

# Logits that float32 holds exactly, up to 12. Each range is that of the others: positions do not
# reach a gate.
GATES = {
    "x": _rng.integers(-90, 91, (len(RANGES), 16, 3)) / 32,
    "w": (_rng.integers(-90, 91, (2, 3)) / 64).astype(np.float32),
    "b": np.asarray([0, 1.5], np.float32),
}
KEYS = _rng.integers(-90, 91, (len(RANGES), 2, 16, 4)) / 16
# Of length 2, so that logits are exact.
HALVES_OF_ONE = np.asarray([[1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)
CHANNELS = {
    "x": GATES["x"], "k": KEYS,
    "w": (_rng.integers(-90, 91, (2, 4, 3)) / 64).astype(np.float32),
}  # fmt: skip
NUMBERS = {"p": np.asarray([1.7, 0.3], np.float32), "a": np.asarray([0.9, 0.05], np.float32)}
PRIOR = {"s": np.asarray([-1.3, -5.5], np.float32), "beta": np.asarray([0.7, 1.1], np.float32)}
MAPS = {
    "x": GATES["x"],
    "gate_map": np.asarray([[0.9, -0.4, 0.2], [-0.3, 0.7, 1.1]], np.float32),
    "content_map": np.asarray([[0.5, 0.6, -0.8], [0.1, -0.9, 0.3]], np.float32),
    "final_map": np.asarray([[0.7, -0.2], [0.4, 1.3]], np.float32),
}
NETWORK = {
    "c": np.float32(0.1), "len_scale": np.float32(1.5),
    "w1": np.asarray([0.9, -0.8, 0.4], np.float32), "b1": np.asarray([-0.3, 0.5, 0.1], np.float32),
    "w2": np.asarray([[0.5, -0.7, 0.3]], np.float32),
}  # fmt: skip
# Scalings, of four frequencies each: where some stay and some change.
LIST = (1.0, 1.5, 2.0, 3.25)
SCALED = {
    kind: {option: posenc.RoPE(8, scaling=scaling) for option, scaling in options.items()}
    for kind, options in {
        "p_rope": {"": Proportional(0.75)},
        "rope_clip_hann": {"": ClipHann(40)},
        "rope_clip_period": {"": ClipPeriod(100)},
        "rope_dynamic": {"": DynamicNTK(2, 64).at_length(300)},
        "rope_llama3": {"": Llama3(train_len=1600)},
        "rope_longrope": {"": LongRoPE((1.0,) * 4, LIST, 64, factor=4).at_length(65)},
        "rope_ntk": {"": NTK(4)},
        "rope_ntk_mixed": {"": NTKMixed(4)},
        "rope_pi": {"": PI(1.1)},
        "rope_yarn": {
            "turns": YaRN(4, 6400, ramp="turns"),
            "index": YaRN(4, 6400),
        },
    }.items()
}

CASES = [
    *options(
        "alibi",
        alibi,
        "bias",
        "ulp",
        {
            "8 heads": posenc.ALiBi(8),
            "12 heads": posenc.ALiBi(12),
            "12 heads, geometric": posenc.ALiBi(12, slopes="geometric"),
        },
    ),
    *options(
        "bam",
        bam,
        "bias",
        "elementary",
        {"inside": BAM(2), "outside": BAM(2, slope="outside")},
        lambda _: PRIOR,
    ),
    *options(
        "cable", gate_sums, "feature c", "sum", {"": posenc.schemes.CABLE(2, 3)}, lambda _: GATES
    ),
    *options("carope", carope, "feature phi", "largest", {"": CARoPE(2, 8, 3)}, lambda _: GATES),
    *options("fox", gate_sums, "feature c", "sum", {"": posenc.schemes.FoX(2, 3)}, lambda _: GATES),
    *options(
        "fope",
        fope,
        "transform",
        "largest",
        {"": FoPE(2, 32, train_len=64)},
        lambda _: {"x": np.stack([VECTORS, VECTORS[::-1]], axis=1)},
    ),
    *options(
        "grape_a",
        grape_a,
        "feature gate",
        "elementary",
        {"": posenc.schemes.GRAPEA(2, 4)},
        lambda _: {"k": KEYS, "u": HALVES_OF_ONE, "omega": np.zeros(2, np.float32)},
    ),
    *options(
        "grape_ap",
        grape_ap,
        "feature key_p",
        "largest",
        {"": posenc.schemes.GRAPEAP(2, 3, p_head_dim=4)},
        lambda _: CHANNELS,
    ),
    *options(
        "wall",
        wall,
        "feature p",
        "sum",
        {"": posenc.schemes.Wall(2, 4, 3, offset=0.5)},
        lambda _: CHANNELS,
    ),
    *options(
        "wavelet",
        wavelet,
        "feature r",
        "largest",
        {
            "ricker": Wavelet(4, scales=2, max_distance=15),
            "gaussian": Wavelet(4, 2, 1.5, "gaussian", max_distance=9, bidirectional=True),
        },
        lambda _: {"k": KEYS},
    ),
    *options("fire", fire, "bias", "largest", {"": FIRE(1, hidden=3)}, lambda _: NETWORK),
    *(
        case
        for kind in ("log", "power")
        for case in options(
            f"kerple_{kind}",
            kerple,
            "bias",
            "elementary",
            {"": Kerple(2, kind=kind)},
            lambda _: NUMBERS,
        )
    ),
    *options(
        "learned",
        learned,
        "embedding",
        "copy",
        {"offset 2": posenc.Learned(RANGES[-1] + 1, 1, offset=2)},
        lambda scheme: {"table": ROWS},
    ),
    *options(
        "log_scale",
        log_scale,
        "transform",
        "elementary",
        {
            kind: LogScale(kind, train_len=48)
            for kind in ("llama4", "ministral3", "inkling", "rerope")
        },
        lambda _: {"x": np.ones((len(RANGES), 1, LENGTH, 1))},
    ),
    *options(
        "log_scale",
        log_scale,
        "transform",
        "elementary",
        {"ssmax": LogScale("ssmax", num_heads=2)},
        lambda _: {"x": np.ones((len(RANGES), 2, LENGTH, 1)), "s": np.float32([0.43, 1.7])},
    ),
    *options("nope", nope, "transform", "copy", {"": posenc.NoPE()}, lambda _: {"x": VECTORS}),
    *options(
        "pope",
        pope,
        "transform",
        "largest",
        {"": PoPE(1, 32)},
        lambda scheme: {"x": VECTORS, "delta": np.zeros((1, 32), np.float32)},
    ),
    *options(
        "relative_table",
        relative_table,
        "bias",
        "copy",
        {
            "both directions": RelativeTable(2, max_distance=15),
            "earlier keys": RelativeTable(2, max_distance=30, bidirectional=False),
        },
        lambda _: {"table": BUCKETS[:, :31]},
    ),
    *options("repo", repo, "feature key_z", "largest", {"": RePo(2, 4, 3, mid=2)}, lambda _: MAPS),
    *options(
        "rope",
        rope,
        "transform",
        "bounded",
        {
            "half": posenc.RoPE(32),
            "interleaved": posenc.RoPE(32, layout="interleaved"),
            "16 of 32 channels": posenc.RoPE(32, rotary_dim=16),
            "base 500000": posenc.RoPE(32, base=500_000.0),
        },
        lambda scheme: {"x": ones(scheme)},
    ),
    *options(
        "rope",
        rope,
        "transform",
        "bounded",
        {"vectors": posenc.RoPE(32)},
        lambda scheme: {"x": VECTORS},
    ),
    *options("sandwich", sandwich, "bias", "largest", {"8 channels": Sandwich(2, dim=8)}),
    *[
        case
        for kind, schemes in SCALED.items()
        for case in options(
            kind, rope, "transform", "bounded", schemes, lambda scheme: {"x": 0.75 * ones(scheme)}
        )
    ],
    *options(
        "sinusoidal",
        sinusoidal,
        "embedding",
        "bounded",
        {
            layout: posenc.Sinusoidal(32, layout=layout)
            for layout in ("interleaved", "concatenated", "tensor2tensor")
        },
    ),
    *options(
        "t5",
        t5,
        "bias",
        "copy",
        {"bidirectional": posenc.T5Bias(2), "causal": posenc.T5Bias(2, causal=True)},
        lambda scheme: {"table": BUCKETS},
    ),
    *options(
        "xpos",
        xpos,
        "transform",
        "largest",
        {"scale base 2**24": XPos(32, scale_base=2.0**24)},
        lambda scheme: {"x": VECTORS},
    ),
]


class Way(NamedTuple):
    """A framework, eager or compiled; ``fixed``: positions are constants of the program."""

    framework: Framework
    compiler: str | None = None
    fixed: bool = False

    def __str__(self) -> str:
        name = {"numpy": "NumPy", "jax": "JAX"}.get(self.framework.name, self.framework.name)
        return " ".join([name, *filter(None, [self.compiler, "fixed" * self.fixed])])


def ways() -> list[Way]:
    """NumPy, and what is installed of torch and JAX."""
    compilers = {"numpy": None, "torch": "inductor", "jax": "jit"}
    installed, found = frameworks(), []
    for name in [name for name in compilers if name in installed]:
        found.append(Way(installed[name]))
        if compilers[name]:
            found += [Way(installed[name], compilers[name], fixed) for fixed in (False, True)]
    return found


def answers(cases: Sequence[Case], way: Way, dtype: str) -> dict[Case, np.ndarray]:
    """What ``way`` says to all of ``cases``, in one program, as float64."""
    own = {f"{case}: {name}": array for case in cases for name, array in case.own.items()}
    cast = {name: dtype for name in own if name.endswith((": x", ": k"))}
    # JAX has 64 bits where an argument has.
    arrays = {**own, "width": np.zeros(1), **({} if way.fixed else POSITIONS)}
    cast["width"] = dtype
    with way.framework.precision_scope([dtype]):
        held = {name: way.framework.array(p, str(p.dtype)) for name, p in POSITIONS.items()}
    program = _program(tuple(cases), dtype, held if way.fixed else {})
    with np.errstate(over="ignore"):  # a far bias is beyond float16
        answer = way.framework.evaluate(program, arrays, cast=cast, compiler=way.compiler)
    assert answer is not None
    assert answer.dtype == dtype
    sizes = np.cumsum([case.exact.high.size for case in cases])
    parts = np.split(answer.values.astype(float), sizes[:-1])
    return {c: p.reshape(c.exact.high.shape) for c, p in zip(cases, parts, strict=True)}


def _program(cases: tuple[Case, ...], dtype: str, held: Mapping[str, Any]) -> Call:
    names = [(case, {name: f"{case}: {name}" for name in case.own}) for case in cases]

    def program(xp: Any, arrays: dict[str, Any]) -> Any:
        given, real, parts = {**arrays, **held}, getattr(xp, dtype), []
        for case, own in names:
            arguments = {name: arrays[at] for name, at in own.items()}
            parts.append(xp.reshape(case.answer(xp, given, arguments, real), (-1,)))
        return xp.concat(parts)

    return program
