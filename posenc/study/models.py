"""Models of one's own: what makes one is named ``module:function``, and is called by backends.

``function(recipe)`` never sees a scheme, so the weights that it draws cannot depend on one. The
positions of a pass reach the model when it is called: ``bound``, of ``Positions.bind``, has
``x = bound.embed(x)`` and one ``attend`` per layer, at the study's positions, schemes and windows.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posenc.apply.embed import has_embedding
from posenc.contract.protocol import PositionScheme
from posenc.study.source import OWN, find_file, names_at_top
from posenc.study.tasks.examples import Integers

if TYPE_CHECKING:
    from posenc.study.decoder import Decoder

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_TRIED = 32  # tokens of a trial
_ROUNDING = 1e-3  # of logits, in any dtype that trains
_ACCEPTED = "accepted: module:function, or a function or class at the top of a module"


def model_name(model: Any) -> str:
    """``module:function`` of a name, or of a function or class; the empty name is posenc's decoder.

    Worker processes import the function by this name.

    Raises
    ------
    TypeError, ValueError
        It is neither, or cannot be imported by its name: a lambda, a function inside a function, a
        module that is not found, a name that the module's file does not have.
    """
    if model == "":
        return ""
    name = model if isinstance(model, str) else _name_of(model)
    if not _FORM.fullmatch(name):
        raise ValueError(f"model names {name!r}; {_ACCEPTED}")
    module = model_module(name)
    if module.partition(".")[0] in OWN:
        raise ValueError(f"model names {name!r}, of a package of posenc; {_ACCEPTED}")
    file = find_file(module)
    if file is None:
        raise ValueError(
            f"model names {name!r}, and no file of a module {module!r} is found in the current "
            "folder or among the installed packages"
        )
    attribute, defined = name.rpartition(":")[2], names_at_top(file)
    if defined is not None and attribute not in defined:
        raise ValueError(f"model names {name!r}, and {file} defines no {attribute!r}; {_ACCEPTED}")
    return name


def model_module(name: str) -> str:
    """The module of ``module:function``."""
    return name.partition(":")[0]


def load_model(name: str) -> Callable[..., Any]:
    """What ``module:function`` stands for; its module is imported here.

    Raises
    ------
    ImportError, ValueError
        The module cannot be imported, or has no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise ImportError(f"model {name!r}: cannot import {module!r}: {cause}") from error
    if not callable(found):
        what = f"{attribute} in {module} is {found!r}, which cannot be called"
        if found is None:
            what = f"{module} defines no {attribute!r}"
        raise ValueError(f"model {name!r}: {what}")
    function: Callable[..., Any] = found
    return function


def _name_of(model: Any) -> str:
    if not callable(model) or not hasattr(model, "__qualname__"):
        raise TypeError(f"model must be a name, a function or a class, got {model!r}; {_ACCEPTED}")
    module, name = model.__module__, model.__qualname__
    if "." in name or "<" in name:
        raise ValueError(f"model is {name!r}, which worker processes cannot import; {_ACCEPTED}")
    return f"{_module_of_script(name) if module == '__main__' else module}:{name}"


def _module_of_script(name: str) -> str:
    """The name under which another process imports the file that runs as ``__main__``."""
    script = sys.modules["__main__"]
    spec = getattr(script, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name)
    file = getattr(script, "__file__", None)
    module = Path(file).stem if file is not None else ""
    found = find_file(module) if module.isidentifier() else None
    if file is None or found is None or found.resolve() != Path(file).resolve():
        where = "was typed at a prompt" if file is None else f"is in {file}"
        raise ValueError(
            f"model {name!r} {where}, which worker processes cannot import; write it into a file "
            "that can be imported, and name it module:function"
        )
    return module


Watch = Callable[[Any], Any]
Logits = Callable[[Integers], Integers]


class Watched:
    """A pass that notes what a model calls of it, to say before a training what it leaves out."""

    def __init__(self, bound: Any) -> None:
        self._bound = bound
        self._embedded, self._attended = 0, [0] * len(bound)

    def __len__(self) -> int:
        return len(self._attended)

    def __iter__(self) -> Iterator[Any]:
        return (self[layer] for layer in range(len(self)))

    def __getitem__(self, layer: int) -> Any:
        attend = self._bound[layer]

        def noted(*vectors: Any, **keywords: Any) -> Any:
            self._attended[layer] += 1
            return attend(*vectors, **keywords)

        return noted

    def embed(self, x: Any) -> Any:
        """``Bound.embed``."""
        self._embedded += 1
        return self._bound.embed(x)

    def params(self, layer: int) -> Any:
        """``Bound.params``: a model that attends by itself reads them."""
        self._attended[layer] += 1
        return self._bound.params(layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def check(self, name: str, schemes: Sequence[PositionScheme]) -> None:
        """``ValueError`` if the model left out a layer, or an embedding that schemes have."""
        left = [layer for layer, calls in enumerate(self._attended) if not calls]
        if left:
            raise ValueError(
                f"model {name!r} never calls the attention of layers {left} of {len(self)}, so "
                "their schemes have no effect; call bound[layer](q, k, v) in each"
            )
        if self._embedded != 1 and any(map(has_embedding, schemes)):
            raise ValueError(
                f"model {name!r} calls bound.embed {self._embedded} times, and the scheme has an "
                "embedding; call x = bound.embed(x) once, before the first layer"
            )


def check_model(
    decoder: Decoder, trace: Callable[[Integers, Watch], Sequence[int]], logits: Logits
) -> None:
    """Try a model of one's own on a few tokens, before it is trained.

    Parameters
    ----------
    trace
        Calls the model of tokens ``(N, T)`` with ``watch(bound)`` instead of its pass, and returns
        the shape of the logits.
    logits
        ``(N, T, V)`` of tokens at test time.

    Raises
    ------
    ValueError
        Logits have another shape, also at the longest length of the study; a later token changes
        those of earlier ones; a layer, or an embedding of the scheme, is left out.
    """
    recipe, watched = decoder.recipe, []
    name, vocabulary = recipe.model, recipe.vocabulary

    def watch(bound: Any) -> Watched:
        watched.append(Watched(bound))
        return watched[-1]

    length = min(recipe.train_tokens, _TRIED)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (2, length))
    for each in (tokens, np.zeros((1, recipe.longest_tokens), np.int64)):
        shape, expected = tuple(trace(each, watch)), (*each.shape, vocabulary)
        if shape != expected:
            raise ValueError(
                f"model {name!r} must return logits {expected}, for tokens {each.shape} and a "
                f"vocabulary of {vocabulary}, got {shape}"
            )
        watched[-1].check(name, decoder.schemes)
    later = tokens.copy()
    later[:, -1] = (later[:, -1] + 1) % vocabulary
    before, after = (logits(each)[:, :-1] for each in (tokens, later))
    change, size = float(np.abs(before - after).max()), float(np.abs(before).max())
    if not change <= _ROUNDING * size:
        raise ValueError(
            f"model {name!r} is not causal: when the last token changes, logits of earlier ones "
            f"change by {change:.3g}, of at most {size:.3g}"
        )
