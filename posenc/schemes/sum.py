"""Several schemes on one layer, such as RoPE with ALiBi.

Embeddings, biases and decays are added, and transforms are applied one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from posenc.apply.feature_needs import reads_features, reads_vectors
from posenc.contract.checks import check_scheme
from posenc.contract.params import OF_ALL_PARTS, Features, Params, float_dtype, head_count
from posenc.contract.protocol import Hook, PositionScheme
from posenc.contract.specs import Array, Arrays, FeatureSpec, Namespace, ParamSpec, Role, Window

_AT_MOST_ONE = {
    Hook.ADJUST_SCORES: "adjusts whole rows",
    Hook.SINK: "has a sink",
    Hook.REGIONS: "has regions",
}


class Combination(PositionScheme):
    """Schemes on one layer, whose biases and embeddings are added: the base of ``Sum``.

    Arrays and features of part ``n`` of ``schemes`` have the prefix ``"{n}_"``.
    """

    schemes: tuple[PositionScheme, ...]

    def __post_init__(self) -> None:
        """Declare the facts of all parts together; ``schemes`` is set."""
        biased, own = self._with_hook(Hook.BIAS), type(self)
        relative = bool(biased) and all(scheme.relative for _, scheme in biased)
        adjusting = (scheme for _, scheme in self._with_hook(Hook.ADJUST_SCORES))
        papers = (scheme.paper for scheme in self.schemes if scheme.paper)
        self._declare(
            relative=relative and not self._with_hook(Hook.BIAS_FACTOR),
            shared=any(scheme.shared for scheme in self.schemes),
            axes=max(scheme.axes for scheme in self.schemes),
            whole_rows=own.whole_rows or "".join(scheme.whole_rows for scheme in adjusting),
            key_paths=any(scheme.key_paths for scheme in self.schemes),
            mixes_heads=own.mixes_heads
            or "; ".join(s.mixes_heads for s in self.schemes if s.mixes_heads),
            paper=own.paper or "; ".join(papers),
        )

    def hooks(self) -> frozenset[Hook]:
        # torch's compiler cannot call frozenset[str]().
        hooks: frozenset[Hook] = frozenset().union(*(scheme.hooks() for scheme in self.schemes))
        splits = all(Hook.KEY_BIAS in scheme.hooks() for _, scheme in self._with_hook(Hook.BIAS))
        if splits and Hook.BIAS_FACTOR not in hooks:
            return hooks
        return hooks - {Hook.KEY_BIAS, Hook.BIAS_FACTOR}

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        if self._with_hook(Hook.BIAS_FACTOR):
            return super().bias_terms()
        return tuple(
            (f"{n}_{prefix}", term)
            for n, scheme in self._with_hook(Hook.BIAS)
            for prefix, term in scheme.bias_terms()
        )

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return self._prefixed("param_specs")

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return self._prefixed("constants")

    def embedding(self, pos: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        return _add(
            scheme.embedding(pos, params=own, xp=xp)
            for scheme, own in self._parts(Hook.EMBEDDING, params, xp)
        )

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        # Half precision rounds once, after the last transform.
        dtype = x.dtype
        if len(self._with_hook(Hook.TRANSFORM)) > 1 and xp.finfo(dtype).bits < 32:
            x = xp.astype(x, xp.float32)
        for scheme, own in self._parts(Hook.TRANSFORM, params, xp):
            x = scheme.transform(x, pos, role=role, params=own, xp=xp)
        return x if x.dtype == dtype else xp.astype(x, dtype)

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        tables: dict[str, Array] = {}
        for scheme, own in self._parts(Hook.ROTARY, params, xp):
            of_part = scheme.rotary(pos, dtype=dtype, params=own, xp=xp)
            tables |= {own.prefix + name: table for name, table in of_part.items()}
        return tables

    def rotary_params(self) -> frozenset[str]:
        parts = enumerate(self.schemes)
        return frozenset(f"{n}_{name}" for n, part in parts for name in part.rotary_params())

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        specs: dict[str, FeatureSpec] = {}
        for n, scheme in enumerate(self.schemes):
            for name, spec in scheme.feature_specs().items():
                specs[f"{n}_{name}"] = replace(spec, compute=_of_part(spec.compute, f"{n}_"))
        return specs

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        biased = self._parts(Hook.BIAS, params, xp)
        bias = _add(scheme.bias(q, k, params=own, xp=xp) for scheme, own in biased)
        for scheme, own in self._parts(Hook.BIAS_FACTOR, params, xp):
            factor = scheme.bias_factor(q, params=own, xp=xp)
            if bias is not None and factor is not None:
                bias = bias * factor
        return bias

    def key_bias(self, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        if self._with_hook(Hook.BIAS_FACTOR):
            return None
        biased = self._parts(Hook.BIAS, params, xp)
        terms = [scheme.key_bias(k, params=own, xp=xp) for scheme, own in biased]
        return None if any(term is None for term in terms) else _add(iter(terms))

    def constant_beyond(self) -> Window:
        ends = [scheme.constant_beyond() for _, scheme in self._with_hook(Hook.BIAS)]
        if not ends or reads_features(self) or self._with_hook(Hook.BIAS_FACTOR):
            return None, None
        lefts, rights = zip(*ends, strict=True)
        return _furthest(lefts), _furthest(rights)

    def channel_decay(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        return _add(
            scheme.channel_decay(q, k, params=own, xp=xp)
            for scheme, own in self._parts(Hook.CHANNEL_DECAY, params, xp)
        )

    def adjust_scores(
        self,
        scores: Array,
        q: Array,
        k: Array,
        *,
        visible: Array | None,
        params: Arrays,
        xp: Namespace,
    ) -> Array:
        for scheme, own in self._parts(Hook.ADJUST_SCORES, params, xp):
            scores = scheme.adjust_scores(scores, q, k, visible=visible, params=own, xp=xp)
        return scores

    def sink(self, q: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        return _add(
            scheme.sink(q, params=own, xp=xp) for scheme, own in self._parts(Hook.SINK, params, xp)
        )

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        for n, scheme in self._with_hook(Hook.REGIONS):
            before, after = self.schemes[:n], self.schemes[n + 1 :]
            return tuple((Sum(*before, part, *after), window) for part, window in scheme.regions())
        return ()

    def scale(self, head_dim: int) -> float:
        default = super().scale(head_dim)
        scales = {scheme.scale(head_dim) for scheme in self.schemes} - {default}
        if len(scales) > 1:
            raise ValueError(f"scale: parts of {self} ask for {sorted(scales)}; give scale=")
        return scales.pop() if scales else default

    def at_length(self, length: int) -> PositionScheme:
        longer = tuple(scheme.at_length(length) for scheme in self.schemes)
        same = all(a is b for a, b in zip(longer, self.schemes, strict=True))
        return self if same else self._with_schemes(longer)

    def caution(self, *, causal: bool) -> str | None:
        cautions = (scheme.caution(causal=causal) for scheme in self.schemes)
        return next((caution for caution in cautions if caution is not None), None)

    def _with_schemes(self, schemes: tuple[PositionScheme, ...]) -> PositionScheme:
        """The same combination of other schemes."""
        return Sum(*schemes)

    def _with_hook(self, hook: Hook) -> list[tuple[int, PositionScheme]]:
        """Index and scheme of each part that has a hook."""
        return [(n, s) for n, s in enumerate(self.schemes) if hook in s.hooks()]

    def _parts(
        self, hook: Hook, params: Arrays, xp: Namespace
    ) -> Iterator[tuple[PositionScheme, PartParams]]:
        """Each part that has a hook, with its own params."""
        for n, scheme in self._with_hook(hook):
            yield scheme, PartParams(params, f"{n}_", float_dtype(params, xp))

    def _prefixed(self, method: str) -> dict[str, Any]:
        """One mapping of all that ``method`` of each part returns, with prefixed names."""
        merged: dict[str, Any] = {}
        for n, scheme in enumerate(self.schemes):
            merged |= {f"{n}_{name}": value for name, value in getattr(scheme, method)().items()}
        return merged


@dataclass(frozen=True, init=False, repr=False)
class Sum(Combination):
    """Several schemes on one layer: ``Sum(RoPE(64), ALiBi(8))``.

    Embeddings, biases and decays of channels are added. Queries and keys go through the transforms
    in the given order, and half precision rounds once, after the last. A part with a
    ``bias_factor`` (``LogScale`` of Inkling) multiplies the bias; the sum is then neither
    ``relative`` nor has it a ``key_bias``. A learned array or feature ``name`` of part ``n`` is
    called ``"{n}_{name}"``. At most one part may have ``adjust_scores`` or regions, and one a sink.
    If any part is ``shared`` between layers, all parts are.

    Parameters
    ----------
    schemes
        Two or more. All parts with a transform, an embedding, ``query_features``, ``key_features``
        or regions, and all with several ``axes``, have the same number of ``axes``.

    Raises
    ------
    TypeError, ValueError
        A part is not a scheme, or the schemes cannot be combined.
    """

    schemes: tuple[PositionScheme, ...]

    def __init__(self, *parts: PositionScheme, schemes: tuple[PositionScheme, ...] = ()) -> None:
        object.__setattr__(self, "schemes", (*parts, *schemes))
        self.__post_init__()

    def __post_init__(self) -> None:
        for scheme in self.schemes:
            check_scheme(scheme)
        if len(self.schemes) < 2:
            raise ValueError(f"Sum takes two schemes or more, got {self.schemes}")
        for hook, does in _AT_MOST_ONE.items():
            names = [type(s).__name__ for s in self.schemes if hook in s.hooks()]
            if len(names) > 1:
                raise ValueError(f"Sum takes one scheme that {does}, got {' and '.join(names)}")
        super().__post_init__()
        if {Hook.ADJUST_SCORES, Hook.REGIONS} <= self.hooks():
            raise ValueError(
                "Sum takes no scheme that adjusts whole rows beside one that has regions, each of "
                f"which is a part of a row: {self}"
            )
        counts = (head_count(scheme) for scheme in self.schemes)
        heads = {count for count in counts if count is not None and count != 1}
        if len(heads) > 1:
            raise ValueError(
                f"Sum takes schemes with the same number of heads, got {sorted(heads)}: {self}"
            )
        # These read places on all axes of the Sum.
        axes = {s.axes for s in self.schemes if _reads_places(s)}
        if axes and axes != {self.axes}:
            axes = {s.axes for s in self.schemes}
            raise ValueError(
                "Sum takes schemes that read places with the same number of axes, "
                f"got {sorted(axes)}: {self.schemes}"
            )

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.schemes))})"


class PartParams(Params):
    """The params and features of one part of a ``Sum``, without their prefix."""

    def __init__(self, whole: Arrays, prefix: str, dtype: Any) -> None:
        query, key = (getattr(whole, side, {}) for side in ("query", "key"))
        super().__init__(
            {}, dtype, PartFeatures(query, prefix, "query"), PartFeatures(key, prefix, "key")
        )
        self._whole, self.prefix = whole, prefix
        tables: Arrays = getattr(whole, "rotary", None) or {}
        own = {n.removeprefix(prefix): t for n, t in tables.items() if n.startswith(prefix)}
        self.rotary = own or None
        self.in_order = getattr(whole, "in_order", False)

    def __getitem__(self, name: str) -> Array:
        return self._whole[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self._whole if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PartFeatures(Features):
    """Features of queries or of keys for one part, without their prefix, and those of all."""

    def __init__(self, whole: Arrays, prefix: str, role: str) -> None:
        super().__init__({}, role)
        self._whole, self._prefix = whole, prefix

    def __getitem__(self, name: str) -> Array:
        return self._whole[name if name in OF_ALL_PARTS else self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._whole if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_part(compute: Callable[..., Array], prefix: str) -> Callable[..., Array]:
    """``compute`` of a feature with the params of its part."""

    def of_part(*tokens: Array, params: Arrays, xp: Namespace, **scale: Any) -> Array:
        own = PartParams(params, prefix, float_dtype(params, xp))
        return compute(*tokens, params=own, xp=xp, **scale)

    return of_part


_RECEIVE_PLACES = frozenset({Hook.TRANSFORM, Hook.EMBEDDING, Hook.REGIONS})


def _reads_places(scheme: PositionScheme) -> bool:
    of_vectors = any(reads_vectors(scheme, role) for role in get_args(Role))
    return bool(scheme.hooks() & _RECEIVE_PLACES) or of_vectors or scheme.axes > 1


def _furthest(distances: tuple[int | None, ...]) -> int | None:
    """The largest of the distances; None if one of them is None."""
    known = [distance for distance in distances if distance is not None]
    return max(known) if len(known) == len(distances) else None


def _add(terms: Iterator[Array | None]) -> Array | None:
    """The sum of the terms that are not None; None if all are."""
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total
