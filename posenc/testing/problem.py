"""One call of attention in NumPy arrays, to be put to any path of any framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from posenc.protocol import Array, Namespace, PositionScheme
from posenc.testing.framework import Answer, Framework, Function, Host

_PARAM = "param:"
_KEPT = 64  # functions, for their compiled programs


@dataclass(frozen=True)
class Problem:
    """Arguments of one call.

    Parameters
    ----------
    scheme
        Any scheme.
    tensors
        ``q (B, H, Q, D)``, ``k (B, Hk, K, D)``, ``v (B, Hk, K, Dv)``, and ``x (B, K, C)`` or
        coordinates for a gated scheme.
    params
        Learned arrays by name.
    options
        Other keywords of attention: numbers, flags, and arrays of positions and segments.
    """

    scheme: PositionScheme
    tensors: Mapping[str, Host]
    params: Mapping[str, Host] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def attend(
        self,
        framework: Framework,
        path: str,
        *,
        dtype: str = "float32",
        compiler: str | None = None,
    ) -> Host:
        """``(B, H, Q, Dv)`` as float64, of tensors and params cast to ``dtype``.

        Params stay at least float32. By default compiled as ``framework.usual`` has it.

        Raises
        ------
        NotImplementedError
            The path cannot serve the call.
        """
        compiler = framework.usual if compiler is None else compiler
        function, cast = self._function(framework, path), self._cast(dtype)
        answer = framework.evaluate(function, self._arrays(), cast=cast, compiler=compiler)
        return _values(answer, dtype)

    def eagerly(self, framework: Framework, path: str, *, dtype: str = "float32") -> Host:
        """``attend`` without a compiler."""
        function, cast = self._function(framework, path), self._cast(dtype)
        answer = framework.evaluate(function, self._arrays(), cast=cast)
        return _values(answer, dtype)

    def gradients(
        self,
        framework: Framework,
        path: str,
        d_out: Host,
        *,
        dtype: str = "float32",
        compiler: str | None = None,
    ) -> tuple[Host, dict[str, Host]]:
        """The result, and gradients of ``sum(d_out * result)`` by names of tensors and params."""
        function, cast = self._function(framework, path), self._cast(dtype)
        out, found = framework.gradients(
            function, self._arrays(), d_out, cast=cast, compiler=compiler
        )
        wide = {name.removeprefix(_PARAM): a.astype(np.float64) for name, a in found.items()}
        return _values(out, dtype), wide

    def _arrays(self) -> dict[str, Host]:
        places = {name: o for name, o in self.options.items() if isinstance(o, np.ndarray)}
        own = {_PARAM + name: array for name, array in self.params.items()}
        return {**self.tensors, **places, **own}

    def _cast(self, dtype: str) -> dict[str, str]:
        wide = "float64" if dtype == "float64" else "float32"
        own = {_PARAM + name: wide for name in self.params}
        return {**dict.fromkeys(self.tensors, dtype), **own}

    def _function(self, framework: Framework, path: str) -> Function:
        fixed = {n: o for n, o in self.options.items() if not isinstance(o, np.ndarray)}
        scheme: Any = self.scheme  # hashable, which its protocol cannot say
        return _attention(framework, path, scheme, tuple(sorted(fixed.items())))


def _values(answer: Answer | None, dtype: str) -> Host:
    assert answer is not None
    if answer.dtype != dtype:
        raise AssertionError(f"attention of {dtype} answers in {answer.dtype}")
    return answer.values.astype(np.float64)


@lru_cache(_KEPT)
def _attention(
    framework: Framework, path: str, scheme: Any, fixed: tuple[tuple[str, Any], ...]
) -> Function:
    """One and the same function for the same arguments, so that it is compiled once."""

    def attend(xp: Namespace, arrays: dict[str, Array]) -> Array:
        tensors = {name: a for name, a in arrays.items() if not name.startswith(_PARAM)}
        params = {n.removeprefix(_PARAM): a for n, a in arrays.items() if n.startswith(_PARAM)}
        return framework.attend(path, tensors, scheme=scheme, params=params, **dict(fixed))

    return attend
