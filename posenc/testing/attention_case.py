"""``AttentionCase``: a call of attention in NumPy arrays, for any implementation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from posenc.attn.arguments import Arguments
from posenc.attn.call import Call
from posenc.attn.prepare import prepare
from posenc.contract.protocol import Array, Namespace, PositionScheme
from posenc.contract.tokens import Tokens
from posenc.testing.framework import Answer, Framework, Function, Host

_PARAM = "param:"
_VECTORS = ("q", "k", "v")
_WIDE = ("tokens.features.", "queries.features.", "bias")  # stay at least float32
_KEPT = 64  # functions whose compiled programs are kept


@dataclass(frozen=True)
class AttentionCase:
    """One call of attention in NumPy arrays, which any implementation can serve.

    Parameters
    ----------
    scheme
        Any scheme.
    tensors
        ``q (B, H, Q, D)``, ``k (B, Hk, K, D)`` and ``v (B, Hk, K, Dv)``. Also the argument ``bias``
        of attention.
    params
        Learned arrays by name.
    options
        Other keywords of attention: numbers, flags, a mask, and ``Tokens`` of NumPy arrays. Their
        hidden states and features are cast like ``tensors``.
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
        layers: int = 0,
    ) -> tuple[Host, dict[str, Host]]:
        """The result, and gradients of ``sum(d_out * result)`` by the names of ``floats``.

        With ``layers``, those of the last of so many equal layers in one forward pass.
        """
        function = self._function(framework, implementation, layers=layers)
        cast = self._cast(dtype)
        out, gradients = framework.gradients(
            function, self._arrays(), d_out, cast=cast, compiler=compiler
        )
        wide = {
            name if name in self._given() else self.name_in_floats(self.param_name(name)): a.astype(
                np.float64
            )
            for name, a in gradients.items()
        }
        return _values(out, dtype), wide

    def prepared(self) -> Call:
        """The call in float64, from which scores can be computed."""
        params = {name: a.astype(np.float64) for name, a in self.params.items()}
        given: dict[str, Any] = {**self.options, **self.tensors}
        q, k, v = (given.pop(name) for name in _VECTORS)
        causal = given.pop("causal", False)
        return prepare(q, k, v, self.scheme, params, causal, Arguments(**given))

    def query_positions(self) -> Host:
        """Positions of the queries, ``(Q,)`` or ``(B, Q)``."""
        q_len, k_len = self.tensors["q"].shape[2], self.tensors["k"].shape[2]
        keys, queries = self.options.get("tokens"), self.options.get("queries")
        pos = None if queries is None else queries.pos
        if queries is None and keys is not None and keys.pos is not None:
            pos = keys.pos[..., k_len - q_len :]
        return np.arange(k_len - q_len, k_len) if pos is None else np.asarray(pos)

    def floats(self) -> dict[str, Host]:
        """Tensors, hidden states and features (``"tokens.x"``), and params by name.

        A param with the name of a tensor is ``"param:v"``.
        """
        own = {self.name_in_floats(name): array for name, array in self.params.items()}
        given = {n: a for n, a in self._given().items() if np.issubdtype(a.dtype, np.floating)}
        return {**given, **own}

    def with_float(self, name: str, array: Host) -> AttentionCase:
        """The same call with another array in place of one of ``floats``."""
        if name in self.tensors:
            return replace(self, tensors={**self.tensors, name: array})
        side, _, what = name.partition(".")
        tokens = self.options.get(side)
        if not isinstance(tokens, Tokens):
            return replace(self, params={**self.params, self.param_name(name): array})
        field_name, _, of = what.partition(".")
        changed: Any = {field_name: {**getattr(tokens, field_name), of: array} if of else array}
        return replace(self, options={**self.options, side: replace(tokens, **changed)})

    def name_in_floats(self, param: str) -> str:
        """The name of a param in ``floats``."""
        return _PARAM + param if param in self.tensors else param

    @staticmethod
    def param_name(name: str) -> str:
        """The inverse of ``name_in_floats``."""
        return name.removeprefix(_PARAM)

    def _given(self) -> dict[str, Host]:
        """Every array but params: tensors, those of ``Tokens`` by names with dots, a mask."""
        given = dict(self.tensors)
        for name, value in self.options.items():
            if isinstance(value, Tokens):
                given |= {f"{name}.{of}": array for of, array in _leaves(value)}
            elif isinstance(value, np.ndarray):
                given[name] = value
        return given

    def _arrays(self) -> dict[str, Host]:
        own = {_PARAM + name: array for name, array in self.params.items()}
        return {**self._given(), **own}

    def _cast(self, dtype: str) -> dict[str, str]:
        wide = "float64" if dtype == "float64" else "float32"
        own = {_PARAM + name: wide for name in self.params}
        floats = (n for n, a in self._given().items() if np.issubdtype(a.dtype, np.floating))
        return {**{n: wide if n.startswith(_WIDE) else dtype for n in floats}, **own}

    def _function(
        self, framework: Framework, implementation: str, *, lse: bool = False, layers: int = 0
    ) -> Function:
        fixed = {n: o for n, o in self.options.items() if not isinstance(o, np.ndarray | Tokens)}
        sides = {n: o for n, o in self.options.items() if isinstance(o, Tokens)}
        # Records without arrays, and features that are none.
        none = [n for n, o in sides.items()]
        none += [f"{n}.features" for n, o in sides.items() if o.features == {}]
        kept = tuple(sorted(fixed.items(), key=lambda item: item[0]))
        scheme: Any = self.scheme  # hashable, which PositionScheme does not declare
        return _attention(framework, implementation, scheme, kept, tuple(none), lse, layers)


def _leaves(tokens: Tokens) -> Iterator[tuple[str, Host]]:
    """The arrays of a record, each with its name; those of a mapping have two names."""
    for name, value in vars(tokens).items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{own}", np.asarray(array)) for own, array in value.items())
        elif value is not None:
            yield name, np.asarray(value)


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
    layers: int,
) -> Function:
    """The same function object for the same arguments, so that it is compiled once."""

    def attend(xp: Namespace, arrays: dict[str, Array]) -> Array:
        vectors: dict[str, Array] = {}
        params: dict[str, Array] = {}
        sides: dict[str, dict[str, Any]] = {n: {} for n in none if "." not in n}
        for name in none:
            side, _, what = name.partition(".")
            if what:
                sides[side][what] = {}
        options: dict[str, Any] = dict(fixed)
        for name, array in arrays.items():
            side, _, what = name.partition(".")
            if name.startswith(_PARAM):
                params[name.removeprefix(_PARAM)] = array
            elif side in sides:
                field_name, _, of = what.partition(".")
                if of:
                    sides[side].setdefault(field_name, {})[of] = array
                else:
                    sides[side][field_name] = array
            else:
                (vectors if name in _VECTORS else options)[name] = array
        options |= {side: Tokens(**facts) for side, facts in sides.items()}
        options |= {"scheme": scheme, "params": params}
        if layers:
            return framework.attend_in_pass(implementation, vectors, layers, **options)
        if not lse:
            return framework.attend(implementation, vectors, **options)
        return framework.attend(implementation, vectors, return_lse=True, **options)[1]

    return attend
