"""``AttentionCase``: a call of attention in NumPy arrays, for any implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from posenc.attn.call import Call, prepare
from posenc.protocol import Array, Namespace, PositionScheme
from posenc.testing.framework import Answer, Framework, Function, Host

_PARAM = "param:"
_VECTORS = ("q", "k", "v", "x", "q_x")
_WIDE = ("q_features:", "k_features:", "bias")  # stay at least float32
_KEPT = 64  # functions whose compiled programs are kept


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention in NumPy arrays, which any implementation can serve.

    Parameters
    ----------
    scheme
        Any scheme.
    tensors
        ``q (B, H, Q, D)``, ``k (B, Hk, K, D)`` and ``v (B, Hk, K, Dv)``. For a scheme with
        features: hidden states ``x (B, K, C)`` and ``q_x (B, Q, C)``, or features by name, as
        ``"q_features:c"`` and ``"k_features:c"``. Also the argument ``bias`` of attention.
    params
        Learned arrays by name.
    options
        Other keywords of attention: numbers, flags, functions, and arrays of positions, segments,
        coordinates and booleans. ``{}`` as features means none.
    """

    scheme: PositionScheme
    tensors: Mapping[str, Host]
    params: Mapping[str, Host] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def attend(
        self,
        framework: Framework,
        implementation: str,
        *,
        dtype: str = "float32",
        compiler: str | None = None,
    ) -> Host:
        """The result ``(B, H, Q, Dv)`` as float64, for tensors and params cast to ``dtype``.

        Params stay at least float32. Default compiler: ``framework.default_compiler``.

        Raises
        ------
        NotImplementedError
            The implementation cannot serve the call.
        """
        compiler = framework.default_compiler if compiler is None else compiler
        function, cast = self._function(framework, implementation), self._cast(dtype)
        answer = framework.evaluate(function, self._arrays(), cast=cast, compiler=compiler)
        return _values(answer, dtype)

    def attend_eagerly(
        self, framework: Framework, implementation: str, *, dtype: str = "float32"
    ) -> Host:
        """``attend`` in eager mode."""
        function, cast = self._function(framework, implementation), self._cast(dtype)
        answer = framework.evaluate(function, self._arrays(), cast=cast)
        return _values(answer, dtype)

    def log_sum_exp(self, framework: Framework, implementation: str) -> Host:
        """The log-sum-exp ``(B, H, Q)``, computed in float32, as float64."""
        function, cast = self._function(framework, implementation, lse=True), self._cast("float32")
        compiler = framework.default_compiler
        answer = framework.evaluate(function, self._arrays(), cast=cast, compiler=compiler)
        return _values(answer, "float32")

    def gradients(
        self,
        framework: Framework,
        implementation: str,
        d_out: Host,
        *,
        dtype: str = "float32",
        compiler: str | None = None,
    ) -> tuple[Host, dict[str, Host]]:
        """The result, and gradients of ``sum(d_out * result)`` by the names of ``floats``."""
        function, cast = self._function(framework, implementation), self._cast(dtype)
        out, gradients = framework.gradients(
            function, self._arrays(), d_out, cast=cast, compiler=compiler
        )
        wide = {
            name if name in self.tensors else self.name_in_floats(self.param_name(name)): a.astype(
                np.float64
            )
            for name, a in gradients.items()
        }
        return _values(out, dtype), wide

    def prepared(self) -> Call:
        """The call in float64, from which scores can be computed."""
        params = {name: a.astype(np.float64) for name, a in self.params.items()}
        given: dict[str, Any] = dict(self.options)
        for name, array in self.tensors.items():
            kind, _, own = name.partition(":")
            if own:
                given[kind] = {**given.get(kind, {}), own: array}
            else:
                given[name] = array
        return prepare(**given, scheme=self.scheme, params=params)

    def query_positions(self) -> Host:
        """Positions of the queries, ``(Q,)`` or ``(B, Q)``."""
        q_len, k_len = self.tensors["q"].shape[2], self.tensors["k"].shape[2]
        return np.asarray(self.options.get("q_pos", np.arange(k_len - q_len, k_len)))

    def floats(self) -> dict[str, Host]:
        """Tensors and params by name; a param with the name of a tensor is ``"param:v"``."""
        own = {self.name_in_floats(name): array for name, array in self.params.items()}
        return {**self.tensors, **own}

    def name_in_floats(self, param: str) -> str:
        """The name of a param in ``floats``."""
        return _PARAM + param if param in self.tensors else param

    @staticmethod
    def param_name(name: str) -> str:
        """The inverse of ``name_in_floats``."""
        return name.removeprefix(_PARAM)

    def _arrays(self) -> dict[str, Host]:
        places = {name: o for name, o in self.options.items() if isinstance(o, np.ndarray)}
        own = {_PARAM + name: array for name, array in self.params.items()}
        return {**self.tensors, **places, **own}

    def _cast(self, dtype: str) -> dict[str, str]:
        wide = "float64" if dtype == "float64" else "float32"
        own = {_PARAM + name: wide for name in self.params}
        given = {n: wide if n.startswith(_WIDE) else dtype for n in self.tensors}
        return {**given, **own}

    def _function(
        self, framework: Framework, implementation: str, *, lse: bool = False
    ) -> Function:
        fixed = {n: o for n, o in self.options.items() if not isinstance(o, np.ndarray)}
        none = tuple(sorted(name for name, value in fixed.items() if value == {}))
        kept = tuple(sorted((n, o) for n, o in fixed.items() if n not in none))
        scheme: Any = self.scheme  # hashable, which PositionScheme does not declare
        return _attention(framework, implementation, scheme, kept, none, lse)


def _values(answer: Answer | None, dtype: str) -> Host:
    assert answer is not None
    if answer.dtype != dtype:
        raise AssertionError(f"attention of {dtype} returns {answer.dtype}")
    return answer.values.astype(np.float64)


@lru_cache(_KEPT)
def _attention(
    framework: Framework,
    implementation: str,
    scheme: Any,
    fixed: tuple[tuple[str, Any], ...],
    none: tuple[str, ...],
    lse: bool,
) -> Function:
    """The same function object for the same arguments, so that it is compiled once."""

    def attend(xp: Namespace, arrays: dict[str, Array]) -> Array:
        vectors: dict[str, Array] = {}
        params: dict[str, Array] = {}
        options: dict[str, Any] = {**dict(fixed), **{name: {} for name in none}}
        for name, array in arrays.items():
            kind, _, own = name.partition(":")
            if kind + ":" == _PARAM:
                params[own] = array
            elif own:
                options.setdefault(kind, {})[own] = array
            else:
                (vectors if name in _VECTORS else options)[name] = array
        options |= {"scheme": scheme, "params": params}
        if not lse:
            return framework.attend(implementation, vectors, **options)
        return framework.attend(implementation, vectors, return_lse=True, **options)[1]

    return attend
