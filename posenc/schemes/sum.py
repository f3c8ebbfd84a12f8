"""Several schemes on one layer: their embeddings and biases added, their transforms one by one.

RoPE with ALiBi, gates with a bias of distance, a sink around anything: what a combination can do
follows from what its parts can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from posenc.checks import check_scheme, python_fields
from posenc.params import Features, Params, float_dtype, head_count
from posenc.protocol import Array, Namespace, ParamSpec, PositionScheme, Role, Window

_ALONE = {"adjust_scores": "adjusts whole rows", "sink": "has a sink", "regions": "has regions"}
PLACES = "places"  # what the library itself adds to features


@dataclass(frozen=True, init=False, repr=False)
class Sum(PositionScheme):
    """``Sum(RoPE(64), ALiBi(8))``: all of them on one layer.

    Embeddings and biases are added. Queries and keys go through the transforms in the order given.
    A learned array or a feature ``name`` of part ``n`` is called ``"{n}_{name}"``. One part may
    adjust whole rows, one may have a sink, one may have regions. If any part shares its arrays
    between layers, all do.

    Parameters
    ----------
    schemes
        Two or more. Those with a transform, an embedding or features of vectors have the same
        number of ``axes``.

    Raises
    ------
    TypeError, ValueError
        Something that is no scheme, or schemes that cannot be combined.
    """

    schemes: tuple[PositionScheme, ...]

    def __init__(self, *parts: PositionScheme, schemes: tuple[PositionScheme, ...] = ()) -> None:
        object.__setattr__(self, "schemes", (*parts, *schemes))
        self.__post_init__()

    def __post_init__(self) -> None:
        python_fields(self)
        for scheme in self.schemes:
            check_scheme(scheme)
        if len(self.schemes) < 2:
            raise ValueError(f"Sum takes two schemes or more, got {self.schemes}")
        for hook, does in _ALONE.items():
            found = [type(s).__name__ for s in self.schemes if hook in s.hooks()]
            if len(found) > 1:
                raise ValueError(f"Sum takes one scheme that {does}, got {' and '.join(found)}")
        counts = (head_count(scheme) for scheme in self.schemes)
        heads = {count for count in counts if count is not None and count != 1}
        if len(heads) > 1:
            raise ValueError(f"Sum takes schemes of as many heads, got {sorted(heads)}: {self}")
        placed = {"transform", "embedding", "query_features", "key_features"}
        axes = {s.axes for s in self.schemes if s.hooks() & placed}
        if axes and axes != {self.axes}:  # they receive places of all axes
            axes = {s.axes for s in self.schemes}
            raise ValueError(
                f"Sum takes transforms and embeddings of as many axes, got {sorted(axes)}: "
                f"{self.schemes}"
            )

    def __repr__(self) -> str:
        return f"Sum({', '.join(map(repr, self.schemes))})"

    @property
    def relative(self) -> bool:  # type: ignore[override]
        """Whether every part with a bias is relative."""
        biased = self._with("bias")
        return bool(biased) and all(scheme.relative for _, scheme in biased)

    @property
    def shared(self) -> bool:  # type: ignore[override]
        """Whether any part shares its arrays between layers."""
        return any(scheme.shared for scheme in self.schemes)

    @property
    def axes(self) -> int:  # type: ignore[override]
        """The most that a part has."""
        return max(scheme.axes for scheme in self.schemes)

    @property
    def paper(self) -> str:  # type: ignore[override]
        """Those of the parts."""
        return "; ".join(scheme.paper for scheme in self.schemes if scheme.paper)

    @property
    def cumulative(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the parts, with their prefixes."""
        return tuple(f"{n}_{name}" for n, s in enumerate(self.schemes) for name in s.cumulative)

    def hooks(self) -> frozenset[str]:
        # Torch's compiler knows no frozenset[str]().
        found: frozenset[str] = frozenset().union(*(scheme.hooks() for scheme in self.schemes))
        if all("key_bias" in scheme.hooks() for _, scheme in self._with("bias")):
            return found
        return found - {"key_bias"}

    def reads_features(self) -> bool:
        return any(scheme.reads_features() for scheme in self.schemes)

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return self._joined("param_specs")

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        return self._joined("constants")

    def embedding(self, pos: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        return _added(
            scheme.embedding(pos, params=own, xp=xp)
            for scheme, own in self._own("embedding", params, xp)
        )

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Mapping[str, Array], xp: Namespace
    ) -> Array:
        for scheme, own in self._own("transform", params, xp):
            x = scheme.transform(x, pos, role=role, params=own, xp=xp)
        return x

    def hidden_features(self, x: Array, **keywords: Any) -> Mapping[str, Array]:
        return self._features("hidden_features", x, **keywords)

    def query_features(self, q: Array, pos: Array, **keywords: Any) -> Mapping[str, Array]:
        return self._features("query_features", q, pos, **keywords)

    def key_features(self, k: Array, pos: Array, **keywords: Any) -> Mapping[str, Array]:
        return self._features("key_features", k, pos, **keywords)

    def bias(
        self, q: Array, k: Array, *, params: Mapping[str, Array], xp: Namespace
    ) -> Array | None:
        return _added(
            scheme.bias(q, k, params=own, xp=xp) for scheme, own in self._own("bias", params, xp)
        )

    def key_bias(self, k: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        found = [
            scheme.key_bias(k, params=own, xp=xp) for scheme, own in self._own("bias", params, xp)
        ]
        return None if any(term is None for term in found) else _added(iter(found))

    def adjust_scores(
        self,
        scores: Array,
        q: Array,
        k: Array,
        *,
        visible: Array | None,
        params: Mapping[str, Array],
        xp: Namespace,
    ) -> Array:
        for scheme, own in self._own("adjust_scores", params, xp):
            scores = scheme.adjust_scores(scores, q, k, visible=visible, params=own, xp=xp)
        return scores

    def sink(self, q: Array, *, params: Mapping[str, Array], xp: Namespace) -> Array | None:
        return _added(
            scheme.sink(q, params=own, xp=xp) for scheme, own in self._own("sink", params, xp)
        )

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        for n, scheme in self._with("regions"):
            before, after = self.schemes[:n], self.schemes[n + 1 :]
            return tuple((Sum(*before, part, *after), window) for part, window in scheme.regions())
        return ()

    def scale(self, head_dim: int) -> float:
        usual = super().scale(head_dim)
        found = {scheme.scale(head_dim) for scheme in self.schemes} - {usual}
        if len(found) > 1:
            raise ValueError(f"scale: parts of {self} ask for {sorted(found)}; give scale=")
        return found.pop() if found else usual

    def at_length(self, length: int) -> PositionScheme:
        longer = tuple(scheme.at_length(length) for scheme in self.schemes)
        same = all(a is b for a, b in zip(longer, self.schemes, strict=True))
        return self if same else Sum(*longer)

    def caution(self, *, causal: bool) -> str | None:
        found = (scheme.caution(causal=causal) for scheme in self.schemes)
        return next((advice for advice in found if advice is not None), None)

    def _with(self, hook: str) -> list[tuple[int, PositionScheme]]:
        """Number and scheme of the parts that have a hook."""
        return [(n, s) for n, s in enumerate(self.schemes) if hook in s.hooks()]

    def _own(
        self, hook: str, params: Mapping[str, Array], xp: Namespace
    ) -> Iterator[tuple[PositionScheme, PartParams]]:
        """The parts that have a hook, and what each of them sees of ``params``."""
        for n, scheme in self._with(hook):
            yield scheme, PartParams(params, f"{n}_", float_dtype(params, xp))

    def _joined(self, method: str) -> dict[str, Any]:
        """What every part declares by name, with its prefix."""
        found: dict[str, Any] = {}
        for n, scheme in enumerate(self.schemes):
            found |= {f"{n}_{name}": one for name, one in getattr(scheme, method)().items()}
        return found

    def _features(
        self, hook: str, *tokens: Array, params: Mapping[str, Array], xp: Namespace, **keywords: Any
    ) -> dict[str, Array]:
        """What every part that has a hook answers by name, with its prefix."""
        found: dict[str, Array] = {}
        for scheme, own in self._own(hook, params, xp):
            of_part = getattr(scheme, hook)(*tokens, params=own, xp=xp, **keywords)
            found |= {own.prefix + name: array for name, array in of_part.items()}
        return found


class PartParams(Params):
    """What one part sees of the params and features of a combination: its own, by its own names."""

    def __init__(self, whole: Mapping[str, Array], prefix: str, dtype: Any) -> None:
        query, key = (getattr(whole, side, {}) for side in ("query", "key"))
        super().__init__(
            {}, dtype, PartFeatures(query, prefix, "query"), PartFeatures(key, prefix, "key")
        )
        self._whole, self.prefix = whole, prefix

    def __getitem__(self, name: str) -> Array:
        return self._whole[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self.prefix) :] for name in self._whole if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PartFeatures(Features):
    """Features of one side that are a part's own, and places, which all parts have."""

    def __init__(self, whole: Mapping[str, Array], prefix: str, role: str) -> None:
        super().__init__({}, role)
        self._whole, self._prefix = whole, prefix

    def __getitem__(self, name: str) -> Array:
        return self._whole[name if name == PLACES else self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._whole if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _added(terms: Iterator[Array | None]) -> Array | None:
    """The sum of those that there are."""
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total
