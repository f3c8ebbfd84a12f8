"""Which function rotates queries and keys in an attention module, found in its code.

The calls of functions whose names speak of rotation are found in the source of ``forward``, with
the conditions around them. Conditions on the module and its configuration are evaluated; those on
what a call is given count as true.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

_ROTATES = re.compile(r"^_?apply_.*(rot|rope)|^rotate_queries")

_Path = tuple[tuple[ast.expr, bool], ...]


class Unclear(Exception):  # noqa: N818
    """The code does not say; the message says what was looked for."""


def rotation_of(attention: Any) -> Callable[..., Any] | None:
    """The function that rotates in ``forward`` of this module; None: it does not rotate.

    Raises
    ------
    Unclear
        Several functions do, or one that is a method of the module.
    """
    found: dict[str, None] = {}
    for call, path in _calls(type(attention).forward):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if _ROTATES.search(method):
            raise Unclear(f"{type(attention).__name__} rotates by its method {method}")
        if _ROTATES.search(name) and all(_holds(attention, *each) for each in path):
            found[name] = None
    if len(found) > 1:
        raise Unclear(f"{type(attention).__name__} rotates by several functions: {list(found)}")
    return next((_names(attention)[name] for name in found), None)


def keyword_of(attention: Any, name: str) -> Any:
    """The value of a keyword in a call of ``forward``, from the module and its configuration.

    Raises
    ------
    Unclear
        No call has that keyword, or its value follows from what ``forward`` is given.
    """
    for call, path in _calls(type(attention).forward):
        for keyword in call.keywords:
            if keyword.arg == name and all(_holds(attention, *each) for each in path):
                try:
                    return _value(attention, keyword.value)
                except NameError as error:
                    raise Unclear(f"{name} follows from {error.name}") from error
    raise Unclear(f"{type(attention).__name__} passes no {name}")


@cache
def _calls(forward: Any) -> tuple[tuple[ast.Call, _Path], ...]:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))
    return tuple(_in(ast.parse(source), ()))


def _in(node: ast.AST, path: _Path) -> Iterator[tuple[ast.Call, _Path]]:
    """Calls below a node, with the conditions under which they are reached."""
    if isinstance(node, ast.Call):
        yield node, path
    if isinstance(node, ast.If | ast.IfExp):
        body = node.body if isinstance(node.body, list) else [node.body]
        others = node.orelse if isinstance(node.orelse, list) else [node.orelse]
        for each in body:
            yield from _in(each, (*path, (node.test, True)))
        for each in others:
            yield from _in(each, (*path, (node.test, False)))
        return
    for child in ast.iter_child_nodes(node):
        yield from _in(child, path)


def _holds(attention: Any, test: ast.expr, wanted: bool) -> bool:
    """Whether a condition is as wanted; one on what a call is given may be either."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        every = [_holds(attention, each, True) for each in test.values]
        return all(every) if wanted else not all(every) or _depends(attention, test)
    try:
        return bool(_value(attention, test)) == wanted
    except NameError:
        return True


def _depends(attention: Any, test: ast.expr) -> bool:
    try:
        _value(attention, test)
    except NameError:
        return True
    return False


def _value(attention: Any, expression: ast.expr) -> Any:
    code = compile(ast.Expression(expression), "<forward>", "eval")
    return eval(code, {**_names(attention), "self": attention})  # noqa: S307


def _names(attention: Any) -> dict[str, Any]:
    return vars(sys.modules[type(attention).forward.__module__])
