"""How an audit calls a function: its kind, its arguments by name, its arrays.

* A rotation is ``f(x, pos)``: ``x (B, H, L, D)``, integers ``pos (B, L)``, to the shape of ``x``.
  For several axes ``pos`` is ``(B, L, axes)``.
* A bias is ``f(num_heads, q_pos, k_pos)``: integers ``(Q,)`` and ``(K,)``, to ``(H, Q, K)``.
* An attention is ``f(q, k, v, ...)``: ``(B, H, L, D)`` each, to the shape of ``q``. Its further
  parameters are given by name, those of ``NAMES`` that it has.
* An embedding is ``f(pos)``: ``pos (B, L)``, to ``(B, L, D)``; or to ``(L, D)``, if it has one row
  alone. A parameter of a name in ``WIDTH`` is given ``D``.

A parameter with the name of a learned array of the definition gets that array.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.audit.arguments import (
    NAMES,
    NotCalledError,
    arguments,
    expected_shape,
    leaf_of,
    must_be_given,
    parameters_of,
)
from posenc.audit.candidate import KINDS, CannotExpressError, said
from posenc.audit.gold import Question
from posenc.testing.framework import Framework, Host, select_frameworks

__all__ = [
    "FRAMEWORKS", "NotCalledError", "Reply", "ask", "check_kind", "framework", "framework_of",
    "gradients", "installed", "kind_of", "leaves_of", "pulled", "said",
]  # fmt: skip

FRAMEWORKS = ("numpy", "torch", "jax")


_Q = ("q", "query", "queries")


@dataclass(frozen=True)
class Reply:
    """What a function returned: its numbers in float64, and the name of their dtype."""

    values: Host
    dtype: str
    changed: tuple[str, ...] = ()


def kind_of(f: Callable[..., Any]) -> str:
    """The kind of a function, by its signature.

    Raises
    ------
    TypeError
        The signature is that of no kind.
    """
    parameters = parameters_of(f)
    names = list(parameters)
    needed = [p for p in parameters.values() if must_be_given(p)]
    if names and names[0] in _Q and len(names) >= 3:
        return "attention"
    if names and names[0] in NAMES["num_heads"]:
        return "bias"
    if len(needed) == 1 or (names and names[0] in NAMES["pos"]):
        return "embedding"
    if len(needed) == 2:
        return "rotation"
    if len(needed) == 3:
        return "bias"
    raise TypeError(
        f"kind cannot be told from the signature ({', '.join(names)}): say kind='rotation' for "
        "f(x, pos), 'bias' for f(num_heads, q_pos, k_pos), 'attention' for f(q, k, v, ...), "
        "'embedding' for f(pos) (--kind rotation)"
    )


def check_kind(kind: str) -> str:
    """``kind``, if there is such a one."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind


def framework(name: str) -> Framework:
    """The arrays of ``numpy``, ``torch`` or ``jax``."""
    if name not in FRAMEWORKS:
        raise ValueError(f"framework must be one of {', '.join(FRAMEWORKS)}, got {name!r}")
    return select_frameworks([name])[0]


def installed() -> list[str]:
    """The frameworks that are installed, in the order in which they are tried."""
    return [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


def ask(f: Callable[..., Any], question: Question, arrays: Framework, dtype: str) -> Reply:
    """Call ``f``, and check the shape and the dtype of what it returns.

    Raises
    ------
    NotCalledError
        It raised, or its result is no array of the right shape and dtype.
    CannotExpressError
        It has no parameter for something that the question asks.
    """
    leaves = leaves_of(question)
    with arrays.precision_scope([dtype]):
        native = {name: _array(arrays, value, dtype) for name, value in leaves.items()}
        first, named = arguments(f, question, arrays, native)
        given = _arrays_of(f, first, named)
        before = {name: np.array(arrays.host(a)) for name, a in given.items()}
        found = _result(f, question, first, named)
        values, result_dtype = _checked(found, question, arrays)
        changed = tuple(
            name for name, a in given.items() if not np.array_equal(arrays.host(a), before[name])
        )
    if question.vectors and result_dtype != dtype:
        raise NotCalledError(
            f"it returned {result_dtype} for vectors of {dtype}; the result has the dtype of them"
        )
    return Reply(values, result_dtype, changed)


def gradients(
    f: Callable[..., Any], question: Question, arrays: Framework, dtype: str, d_out: Host
) -> dict[str, Host]:
    """Gradients of ``sum(d_out * f(...))`` by vectors and learned arrays, by name."""

    def run(native: Mapping[str, Any]) -> Any:
        return _result(f, question, *arguments(f, question, arrays, native))

    return pulled(run, leaves_of(question), arrays, dtype, d_out)


def pulled(
    run: Callable[[Mapping[str, Any]], Any],
    leaves: Mapping[str, Host],
    arrays: Framework,
    dtype: str,
    d_out: Host,
) -> dict[str, Host]:
    """Gradients of ``sum(d_out * run(leaves))``, by name."""
    with arrays.precision_scope([dtype]):
        native = {name: _array(arrays, value, dtype) for name, value in leaves.items()}
        try:
            if arrays.name == "jax":  # without jit, which would trace positions
                jax = importlib.import_module("jax")
                out, transpose = jax.vjp(run, native)
                found = transpose(arrays.xp.asarray(d_out).astype(out.dtype))[0]
            else:
                given = dict(native)
                _, found = arrays.pullback(lambda _, a: run(a), given, list(given), d_out, None)
        except (NotCalledError, CannotExpressError):
            raise
        except Exception as error:
            raise NotCalledError(f"its gradient raised {said(error)}") from error
        return {name: np.asarray(arrays.host(a), np.float64) for name, a in found.items()}


def leaves_of(question: Question) -> dict[str, Host]:
    """The floating-point arrays of a question, by name."""
    learned = {leaf_of(question, name): value for name, value in question.params.items()}
    return {**question.vectors, **learned}


def _array(arrays: Framework, value: Host, dtype: str) -> Any:
    if arrays.name == "numpy":  # a copy that may be written to, as users have them
        return np.array(value, dtype)
    return arrays.array(value, dtype)


def _arrays_of(
    f: Callable[..., Any], first: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The arrays among the arguments of ``f``, under the names of its parameters."""
    own = list(parameters_of(f))
    names = own if len(own) >= len(first) else [str(n + 1) for n in range(len(first))]
    given = {**dict(zip(names, first, strict=False)), **named}
    return {name: value for name, value in given.items() if hasattr(value, "shape")}


def _result(
    f: Callable[..., Any], question: Question, first: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    try:
        found = f(*first, **named)
    except (NotCalledError, CannotExpressError):
        raise
    except Exception as error:
        if question.grouped and not any(n in named for n in (*NAMES["kv_heads"], "enable_gqa")):
            raise CannotExpressError(
                f"no fewer key heads than query heads: {said(error)}"
            ) from None
        raise NotCalledError(f"it raised {said(error)}") from error
    if question.kind == "embedding" and len(getattr(found, "shape", ())) == 2:
        if len(question.q_pos) > 1:
            raise CannotExpressError("it returns (L, D): it has no rows of a batch")
        return found[None]
    return found


def _checked(found: Any, question: Question, arrays: Framework) -> tuple[Host, str]:
    """The numbers of a result and their dtype."""
    if isinstance(found, (tuple, list)) or not hasattr(found, "shape"):
        raise NotCalledError(f"it returned {_named(found)} where one array is expected")
    if framework_of(found) != arrays.name:
        raise NotCalledError(
            f"it returned {_named(found)} for arrays of {arrays.name}; say framework="
            f"{framework_of(found)!r} if these are what it takes"
        )
    shape = expected_shape(question)
    if tuple(found.shape) != shape:
        raise NotCalledError(
            f"it returned shape {tuple(found.shape)}, where {shape} is expected: "
            f"{_LETTERS[question.kind]}{_remark(tuple(found.shape), shape, question.kind)}"
        )
    dtype = arrays.dtype(found)
    if "float" not in dtype:
        raise NotCalledError(f"it returned {dtype}, where floating-point numbers are expected")
    return np.asarray(arrays.host(found), np.float64), dtype


_LETTERS = {
    "rotation": "(B, H, L, D)", "bias": "(H, Q, K)", "attention": "(B, H, L, D)",
    "embedding": "(B, L, D)",
}  # fmt: skip


def _remark(found: Sequence[int], expected: Sequence[int], kind: str) -> str:
    """A remark where the same sizes come in another order, or an embedding has another width."""
    if kind == "embedding" and found[:-1] == expected[:-1]:
        return f"; name its width in the label, as sinusoidal:dim={found[-1]}"
    return "; the same sizes in another order" if sorted(found) == sorted(expected) else ""


def _named(found: Any) -> str:
    kind = type(found)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


def framework_of(array: Any) -> str:
    """Whose array it is, as ``FRAMEWORKS`` names it."""
    home = type(array).__module__.partition(".")[0]
    return "jax" if home.startswith("jax") else home
