"""The gold of an audit: what a scheme defines, in float64, and how far rounding may lead from it.

A ``Question`` is one call with all that it is given. ``answer`` is what the definition says, by
posenc's own reference in float64 NumPy, and ``allowed`` is a tolerance for each of its numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import posenc
from posenc.contract.protocol import Hook, PositionScheme, SchemeWarning
from posenc.contract.tokens import Tokens
from posenc.schemes import Sinusoidal
from posenc.testing.framework import Host
from posenc.testing.tolerances import attention_bound, rounding_bound

ROTATION_ROUNDINGS = 8
"""Roundings of a rotated channel: cosine and sine 2 each, a factor, two products and a sum. In half
precision cosines and sines may be rounded to it, so the number is the same."""

ANGLE_ROUNDINGS = 4
"""Roundings of a float32 angle ``pos * base**(-e)``, relative to ``pos``: the power and its
reciprocal 1 each, the product 1, and the exponent ``e * ln(base) * base**-e``, at most 0.4. At
position 100 000 a correct float32 function may thus be off by 0.02 of a vector's length. Half
precision of vectors changes nothing in that: angles are float32 there too."""

BIAS_ROUNDINGS = 16
"""Roundings of a bias, relative to it or to 1: slope, distance, product, or a logarithm of it."""

_REACH = 30.0  # keys whose score is this much below the highest have no weight


@dataclass(frozen=True)
class Question:
    """One call of a candidate.

    Attributes
    ----------
    kind
        ``rotation``, ``bias``, ``attention`` or ``embedding``.
    scheme, params
        The definition, and its learned arrays.
    q_pos, k_pos
        Positions. Rotation and embedding: ``q_pos (B, L)``, or ``(B, L, axes)``. Bias: ``(Q,)``
        and ``(K,)``. Attention: ``(B, Q)`` and ``(B, K)``.
    vectors
        ``x (B, H, L, D)``, or ``q``, ``k`` and ``v``, by name, in float64.
    causal, window, seg
        Of an attention: its mask, and segments ``(B, K)`` of the keys.
    scale, softcap
        Of an attention: the factor of its scores, None for that of the definition, and their cap.
    region
        Which pairs of a bias are compared: ``before`` is keys up to the query, ``after`` later
        ones, ``all`` both.
    """

    kind: str
    scheme: PositionScheme
    q_pos: Host
    k_pos: Host | None = None
    params: Mapping[str, Host] = field(default_factory=dict)
    vectors: Mapping[str, Host] = field(default_factory=dict)
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    seg: Host | None = None
    num_heads: int = 1
    scale: float | None = None
    softcap: float | None = None
    region: str = "all"

    def change(self, **other: Any) -> Question:
        """The same question but for some fields."""
        return replace(self, **other)

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share one of keys."""
        return "k" in self.vectors and self.vectors["k"].shape[1] < self.num_heads

    @property
    def scores_scale(self) -> float:
        """The factor of the scores of an attention."""
        own = self.scheme.scale(self.vectors["q"].shape[-1])
        return own if self.scale is None else self.scale

    def queries(self) -> Tokens:
        """Positions and segments of the queries, which are the last tokens of the keys."""
        length = self.q_pos.shape[-1]
        return Tokens(self.q_pos, None if self.seg is None else self.seg[..., -length:])


def drawn_params(scheme: PositionScheme, seed: int = 0) -> dict[str, Host]:
    """Learned arrays for a scheme, float32: the same for equal shapes, and none of them special.

    Adapters load them into the module that they call.
    """
    rng = np.random.default_rng([seed, 30])
    first = posenc.init_params(scheme, seed)
    return {
        name: (value + rng.integers(-32, 33, value.shape) / 32).astype(np.float32)
        for name, value in first.items()
    }


def drawn(shape: tuple[int, ...], seed: int) -> Host:
    """Vectors of multiples of 1/32 up to 2, which bfloat16 and float16 hold exactly."""
    return np.random.default_rng([seed, 7]).integers(-64, 65, shape) / 32


def at_length(scheme: PositionScheme, pos: Host) -> PositionScheme:
    """The scheme for a context that ends with the largest position, as LongRoPE depends on it."""
    return scheme.at_length(int(np.max(pos, initial=0)) + 1)


def answer(question: Question) -> Host:
    """What the definition says, in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SchemeWarning)
        return _ANSWERS[question.kind](question)


def _rotation(question: Question) -> Host:
    x, pos = question.vectors["x"], question.q_pos
    scheme = at_length(question.scheme, pos)
    given: dict[str, Any] = {"params": _wide(question.params), "role": "query"}
    if scheme.axes > 1 and pos.ndim == 3:
        given["places"] = pos
        pos = pos[..., 0]
    return np.asarray(posenc.transform(scheme, x, pos, **given))


def _bias(question: Question) -> Host:
    pos = np.concatenate([question.q_pos, _keys(question)])
    scheme = at_length(question.scheme, pos)
    found = posenc.bias(
        scheme, question.q_pos, _keys(question), _wide(question.params), dtype=np.float64
    )
    if found is None:
        raise ValueError(f"{type(scheme).__name__} has no bias; audit it as another kind")
    return np.array(np.broadcast_to(found, (question.num_heads, *found.shape[-2:])))


def _attention(question: Question) -> Host:
    keys = _keys(question)
    scheme = at_length(question.scheme, keys)
    given: dict[str, Any] = {name: question.vectors[name] for name in "qkv"}
    found: Host = posenc.attention(
        **given,
        scheme=scheme,
        params=_wide(question.params),
        causal=question.causal,
        window=question.window,
        tokens=Tokens(keys, question.seg),
        queries=question.queries(),
        scale=question.scale,
        softcap=question.softcap,
        implementation="reference",
    )
    return found


def _embedding(question: Question) -> Host:
    params = _wide(question.params)
    found = posenc.embedding(question.scheme, question.q_pos, params, dtype=np.float64)
    if found is None:
        raise ValueError(f"{type(question.scheme).__name__} has no embedding")
    return np.asarray(found)


_ANSWERS = {
    "rotation": _rotation,
    "bias": _bias,
    "attention": _attention,
    "embedding": _embedding,
}


def allowed(question: Question, gold: Host, dtype: str) -> Host:
    """How far each number of a correct result in ``dtype`` may be from ``gold``."""
    return _ALLOWED[question.kind](question, gold, dtype)


def _allowed_rotation(question: Question, gold: Host, dtype: str) -> Host:
    x = question.vectors["x"]
    size = np.maximum(np.max(np.abs(x), -1), np.max(np.abs(gold), -1))[..., None]
    relative = rounding_bound(ROTATION_ROUNDINGS, 1, dtype) + _angles(question, dtype)
    return np.broadcast_to(2 * size * relative, gold.shape)


def _angles(question: Question, dtype: str) -> Host:
    """The error of angles, ``(B, 1, L, 1)``; 0 without a rotation."""
    pos = question.q_pos
    if pos.ndim == 3:
        pos = np.max(np.abs(pos), -1)
    at = np.abs(pos)[:, None, :, None].astype(np.float64)
    if not has_angles(question.scheme):
        return 0 * at
    return rounding_bound(ANGLE_ROUNDINGS, 1, angle_dtype(dtype)) * at


def has_angles(scheme: PositionScheme) -> bool:
    """Whether positions become angles."""
    parts = [scheme, *(part for part, _ in scheme.regions())]
    return any(Hook.ROTARY in part.hooks() for part in parts)


def angle_dtype(dtype: str) -> str:
    """The dtype that angles must have for vectors of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


def _allowed_bias(question: Question, gold: Host, dtype: str) -> Host:
    size = np.where(np.isfinite(gold), np.maximum(np.abs(gold), 1), 1)
    found: Host = rounding_bound(BIAS_ROUNDINGS, 1, dtype) * size
    return found


def _allowed_attention(question: Question, gold: Host, dtype: str) -> Host:
    q, k, v = (question.vectors[name] for name in "qkv")
    norms = (np.max(np.linalg.norm(a, axis=-1), initial=0) for a in (q, k))
    score = abs(question.scores_scale) * float(np.prod(list(norms)))
    score *= amplitude(question.scheme) ** 2
    bound = attention_bound(dtype, channels=q.shape[-1], keys=k.shape[2], score=score)
    largest = float(np.max(np.abs(v), initial=1))
    far = float(np.max(np.abs(_keys(question)), initial=0))
    bound += rounding_bound(BIAS_ROUNDINGS, _REACH, "float32")
    if has_angles(question.scheme):
        bound += rounding_bound(ANGLE_ROUNDINGS, 2 * score * far, angle_dtype(dtype))
    return np.full(gold.shape, bound * max(1.0, largest))


def _allowed_embedding(question: Question, gold: Host, dtype: str) -> Host:
    size = np.maximum(np.abs(gold), 1)
    relative: Host = np.asarray(2 * rounding_bound(ROTATION_ROUNDINGS, 1, dtype))
    if isinstance(question.scheme, Sinusoidal):
        at = np.abs(question.q_pos)[..., None].astype(np.float64)
        relative = relative + 2 * rounding_bound(ANGLE_ROUNDINGS, 1, angle_dtype(dtype)) * at
    return np.asarray(size * relative)


_ALLOWED = {
    "rotation": _allowed_rotation,
    "bias": _allowed_bias,
    "attention": _allowed_attention,
    "embedding": _allowed_embedding,
}


def amplitude(scheme: PositionScheme) -> float:
    """The factor of cosines and sines."""
    return float(getattr(scheme, "attention_factor", 1.0))


def rotation_gradient(question: Question, d_out: Host) -> Host | None:
    """The gradient of ``sum(d_out * rotation(x))`` by ``x``; None if the transform is not linear.

    A rotation is linear in ``x``, so the gradient is that of its matrix transposed: channel ``c``
    of it is ``sum(d_out * rotation(e_c))``.
    """
    x = question.vectors["x"]
    twice = answer(question.change(vectors={"x": 2 * x}))
    if not np.allclose(twice, 2 * answer(question), atol=1e-9):
        return None
    gradient = np.zeros_like(x)
    for channel in range(x.shape[-1]):
        unit = np.zeros_like(x)
        unit[..., channel] = 1
        turned = answer(question.change(vectors={"x": unit}))
        gradient[..., channel] = np.sum(d_out * turned, axis=-1)
    return gradient


def _keys(question: Question) -> Host:
    return question.q_pos if question.k_pos is None else question.k_pos


def _wide(params: Mapping[str, Host]) -> dict[str, Host]:
    return {name: np.asarray(value, np.float64) for name, value in params.items()}
