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
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posenc.audit.candidate import KINDS, CannotExpressError
from posenc.audit.gold import Question, answer
from posenc.positions.integers import visible
from posenc.testing.framework import Framework, Host, select_frameworks

FRAMEWORKS = ("numpy", "torch", "jax")

NAMES: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "mask": ("mask", "attn_mask"),
    "pos": ("pos", "positions", "position_ids"),
    "q_pos": ("q_pos", "query_pos", "q_positions"),
    "k_pos": ("k_pos", "key_pos", "kv_pos", "k_positions"),
    "seg": ("seg", "segment_ids", "segments"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "window": ("window", "window_size", "sliding_window"),
    "num_heads": ("num_heads", "n_heads", "heads"),
    "sink": ("sink", "sinks"),
}
"""Parameters of an attention, and the names under which it may have them.

``mask`` is booleans ``(B, 1, Q, K)``, True where a query sees a key, with segments, window and
order of time in it; None where ``causal`` says it all.
"""

WIDTH = ("dim", "d_model", "embed_dim", "hidden_size")
"""Names under which an embedding may have its width."""

_Q = ("q", "query", "queries")


class NotCalledError(Exception):
    """A function raised, or returned something else than it should."""


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
    needed = [p for p in parameters.values() if _must_be_given(p)]
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
        "'embedding' for f(pos)"
    )


def parameters_of(f: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, by name; of a module, those of its ``forward``."""
    named = getattr(f, "forward", f) if not inspect.isfunction(f) else f
    try:
        return dict(inspect.signature(named).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


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
        before = {name: np.array(arrays.host(a)) for name, a in native.items()}
        found = _call(f, question, arrays, native)
        values, result_dtype = _checked(found, question, arrays)
        changed = tuple(
            name for name, a in native.items() if not np.array_equal(arrays.host(a), before[name])
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
        return _call(f, question, arrays, native)

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


def leaf_of(question: Question, name: str) -> str:
    """The name of a learned array among the leaves: Transformer-XL learns a ``v`` of its own."""
    return f"learned {name}" if name in question.vectors else name


def _array(arrays: Framework, value: Host, dtype: str) -> Any:
    if arrays.name == "numpy":  # a copy that may be written to, as users have them
        return np.array(value, dtype)
    return arrays.array(value, dtype)


def integers(arrays: Framework, value: Host) -> Any:
    """Positions as the framework has them: 64 bits, and 32 in JAX, where these are the default."""
    name = "int32" if arrays.name == "jax" else "int64"
    whole = np.array(value, name)
    return whole if arrays.name == "numpy" else arrays.array(whole, name)


def _call(
    f: Callable[..., Any], question: Question, arrays: Framework, native: Mapping[str, Any]
) -> Any:
    first, named = _arguments(f, question, arrays, native)
    try:
        found = f(*first, **named)
    except CannotExpressError:
        raise
    except Exception as error:
        raise NotCalledError(f"it raised {said(error)}") from error
    if question.kind == "embedding" and len(getattr(found, "shape", ())) == 2:
        if len(question.q_pos) > 1:
            raise CannotExpressError("it returns (L, D): it has no rows of a batch")
        return found[None]
    return found


def said(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _arguments(
    f: Callable[..., Any], question: Question, arrays: Framework, native: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by position, and by name."""
    parameters = parameters_of(f)

    def pos(value: Host | None) -> Any:
        return integers(arrays, question.q_pos if value is None else value)

    if question.kind == "rotation":
        first = [native["x"], pos(None)]
    elif question.kind == "bias":
        first = [question.num_heads, pos(None), pos(question.k_pos)]
    elif question.kind == "embedding":
        first = [pos(None)]
    else:
        first = [native[name] for name in "qkv"]
    rest = dict(list(parameters.items())[len(first) :])
    named = {n: native[leaf_of(question, n)] for n in question.params if n in rest}
    if question.kind == "attention":
        named |= _attention_arguments(rest, question, arrays, native)
    if question.kind == "embedding":
        named |= {n: expected_shape(question)[-1] for n in WIDTH if n in rest}
    missing = [n for n, p in rest.items() if n not in named and _must_be_given(p)]
    if missing:
        known = list(question.params)
        known += {
            "attention": [n for names in NAMES.values() for n in names], "embedding": list(WIDTH)
        }.get(question.kind, [])  # fmt: skip
        raise NotCalledError(
            f"its parameter {missing[0]!r} has no default, and is none of those that it can be "
            f"given: {', '.join(known) or 'none'}"
        )
    return first, named


def _must_be_given(parameter: inspect.Parameter) -> bool:
    several = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in several


def _attention_arguments(
    rest: Mapping[str, Any], question: Question, arrays: Framework, native: Mapping[str, Any]
) -> dict[str, Any]:
    """What an attention is given by name; an error where it lacks what the question needs."""
    own = {role: next((n for n in names if n in rest), None) for role, names in NAMES.items()}
    keys = question.q_pos if question.k_pos is None else question.k_pos
    length, queries = keys.shape[-1], question.q_pos.shape[-1]
    in_order = np.array_equal(keys, np.broadcast_to(np.arange(length), keys.shape))
    at_end = np.array_equal(question.q_pos, keys[:, length - queries :])
    if not in_order or not at_end:
        has = (own["q_pos"] and own["k_pos"]) or (at_end and own["pos"])
        _need(bool(has), "q_pos and k_pos", "positions of its tokens")
    if queries != length and own["pos"] and not own["q_pos"]:
        _need(False, "q_pos and k_pos", "positions of fewer queries than keys")
    if question.seg is not None:
        _need(bool(own["seg"] or own["mask"]), "seg or mask", "documents, or padding")
    _need(
        question.causal or bool(own["causal"] or own["mask"]),
        "causal or mask",
        "a call without causal mask",
    )
    plain = question.seg is None and (question.window is None or own["window"] is not None)
    by_flag = bool(own["causal"]) and plain
    seen = None if by_flag else integers_of_mask(question, keys)
    values: dict[str, Any] = {
        "causal": question.causal and (by_flag or not own["mask"]),
        "mask": None if seen is None else _booleans(arrays, seen),
        "pos": integers(arrays, keys),
        "q_pos": integers(arrays, question.q_pos),
        "k_pos": integers(arrays, keys),
        "seg": None if question.seg is None else integers(arrays, question.seg),
        "scale": question.scheme.scale(question.vectors["q"].shape[-1]),
        "window": question.window,
        "num_heads": question.num_heads,
        "sink": native.get("sink"),
    }
    return {n: values[role] for role, n in own.items() if n is not None}


def integers_of_mask(question: Question, keys: Host) -> Host:
    """The mask of a question as booleans ``(B, 1, Q, K)``."""
    q, k = question.q_pos[..., :, None], keys[..., None, :]
    width = question.window
    window = (width - 1, width - 1) if isinstance(width, int) else width
    seen = visible(q, k, causal=question.causal, window=window, first_tokens=0)
    seen = np.ones((q - k).shape, bool) if seen is None else np.asarray(seen)
    if question.seg is not None:
        of_queries = question.seg[..., question.seg.shape[-1] - q.shape[-2] :]
        seen = seen & (of_queries[..., :, None] == question.seg[..., None, :])
    return seen[:, None]


def _booleans(arrays: Framework, value: Host) -> Any:
    return np.array(value) if arrays.name == "numpy" else arrays.array(value, "bool")


def _need(has: bool, parameter: str, what: str) -> None:
    if not has:
        raise CannotExpressError(f"it has no parameter for {what}: {parameter}")


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


def expected_shape(question: Question) -> tuple[int, ...]:
    """The shape of a right result."""
    if question.kind == "bias":
        keys = question.q_pos if question.k_pos is None else question.k_pos
        return (question.num_heads, len(question.q_pos), len(keys))
    if question.kind == "embedding":
        return tuple(answer(question).shape)
    return tuple(question.vectors["x" if question.kind == "rotation" else "q"].shape)


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
