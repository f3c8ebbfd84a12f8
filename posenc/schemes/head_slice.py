"""A slice of a scheme's heads, for tensor parallelism: each device computes its own heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from posenc.contract.checks import check_count, nearest
from posenc.contract.fields import Count
from posenc.contract.params import head_count, initial_value, key_head_count
from posenc.contract.protocol import Hook, PositionScheme
from posenc.contract.specs import Array, ParamSpec, Window
from posenc.schemes.wrapper import Wrapper


@dataclass(frozen=True)
class HeadSlice(Wrapper):
    """Heads ``start .. stop - 1`` of a scheme: a device of tensor parallelism computes its own.

    Attention of ``q[:, start:stop]`` with it is the slice of attention of all heads. Slopes, tables
    and first values are those that these heads have in the whole. ALiBi of half as many heads has
    other slopes.

    Per-head arrays have the rows of the slice: ``slice_params`` takes them from the whole. All
    others are whole on each device, so the gradients of their copies must be summed.

    Parameters
    ----------
    scheme
        The scheme of all heads.
    start, stop
        First head, and the one after the last.
    total
        Number of all heads. Default: that of the scheme.

    Raises
    ------
    ValueError
        The slice is empty or reaches beyond ``total``; the scheme has another number of heads; or
        one head of the scheme needs others (DAPE, SelectiveRoPE).
    """

    scheme: PositionScheme
    start: int
    stop: Count
    total: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name, own = type(self.scheme).__name__, head_count(self.scheme)
        if self.scheme.mixes_heads:
            raise ValueError(f"{name} has no slices of heads: {self.scheme.mixes_heads}")
        total = own if self.total is None else self.total
        if total is None:
            raise ValueError(f"total: {name} has no number of heads of its own; give that of all")
        if own not in (None, 1, total):
            raise ValueError(f"total={total}: the scheme has {own} heads: {self.scheme}")
        check_count("start", self.start, least=0)
        if not self.start < self.stop <= total:
            raise ValueError(
                f"start={self.start}, stop={self.stop}: a slice of {total} heads has "
                f"0 <= start < stop <= {total}"
            )
        object.__setattr__(self, "total", total)
        key_heads = key_head_count(self.scheme)
        of_keys = slice(0) if key_heads is None else self.key_heads(key_heads)
        # Here, because torch's compiler cannot construct every scheme.
        parts = tuple((self._of(part), window) for part, window in self.scheme.regions())
        terms = tuple(
            (prefix, self if term is self.scheme else self._of(term))
            for prefix, term in self.scheme.bias_terms()
        )
        for field, value in (("_of_keys", of_keys), ("_regions", parts), ("_terms", terms)):
            object.__setattr__(self, field, value)

    @property
    def num_heads(self) -> int:
        """Number of heads of the slice."""
        return self.stop - self.start

    def key_heads(self, num_kv_heads: int) -> slice:
        """The heads of keys and values that these query heads read (GQA): ``k[:, slice]``.

        Raises
        ------
        ValueError
            ``num_kv_heads`` does not divide all heads; or the slice has a part of a group, and is
            not inside one.
        """
        assert self.total is not None
        check_count("num_kv_heads", num_kv_heads)
        if self.total % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} does not divide {self.total} heads")
        group = self.total // num_kv_heads
        first, last = self.start // group, (self.stop - 1) // group
        if first != last and (self.start % group or self.stop % group):
            raise ValueError(
                f"heads {self.start} .. {self.stop - 1} are no whole groups of {group} that share "
                f"keys, nor inside one: num_kv_heads={num_kv_heads}"
            )
        return slice(first, last + 1)

    def slice_params(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Learned arrays of this slice, from those of all heads; views where the library has them.

        Names may have a model's prefix, as ``"0.table"`` in the state of ``Positions``.
        """
        specs = self.scheme.param_specs()
        cut: dict[str, Array] = {}
        for name, array in params.items():
            own = name.rpartition(".")[2]
            if own not in specs:
                raise ValueError(f"{type(self.scheme).__name__} has no param {name!r}"
                                 f"{nearest(own, specs)}")  # fmt: skip
            spec = specs[own]
            if tuple(array.shape) != spec.shape:
                raise ValueError(
                    f"params[{name!r}] has shape {tuple(array.shape)}, expected that of all heads, "
                    f"{spec.shape}"
                )
            cut[name] = array[self._rows(spec)] if spec.per_head else array
        return cut

    def hooks(self) -> frozenset[Hook]:
        return self.scheme.hooks()

    def param_specs(self) -> Mapping[str, ParamSpec]:
        return {name: self._cut(spec) for name, spec in self.scheme.param_specs().items()}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        fixed = self.scheme.constants()
        return {name: values[self._of_size(len(values))] for name, values in fixed.items()}

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        parts: tuple[tuple[PositionScheme, Window], ...] = self._regions  # type: ignore[attr-defined]
        return parts

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        terms: tuple[tuple[str, PositionScheme], ...] = self._terms  # type: ignore[attr-defined]
        return terms

    def _of(self, part: PositionScheme) -> HeadSlice:
        """The same heads of a part of the scheme."""
        return HeadSlice(part, self.start, self.stop, self.total)

    def _of_size(self, size: int) -> slice:
        """The rows of an array with an axis of heads; a single row is that of all heads."""
        return slice(0, 1) if size == 1 else slice(self.start, self.stop)

    def _rows(self, spec: ParamSpec) -> slice:
        of_keys: slice = self._of_keys  # type: ignore[attr-defined]
        return of_keys if spec.of_keys else self._of_size(spec.shape[0])

    def _cut(self, spec: ParamSpec) -> ParamSpec:
        if not spec.per_head:
            return spec
        rows, whole = self._rows(spec), spec.shape

        def init(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
            return initial_value(spec, rng)[rows]

        return replace(spec, shape=(rows.stop - rows.start, *whole[1:]), init=init)
