"""What implementations say to a scheme, and what they cost: ``explain``, and docs/costs.json."""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from markdown_parts import table
from scheme_facts import DOCS, FOLDER, ROOT, names, scheme_of

import posenc
from posenc.contract.protocol import Hook


def implementations(name: str) -> str:
    """What each implementation says to a plain causal call."""
    cells = [
        (framework, ", ".join(f"`{each}`" for each in which), answer)
        for framework, answers in answers_of_all()[name].items()
        for answer, which in answers.items()
    ]
    intro = (
        "Asked for a causal call of 2048 tokens, 8 heads of 64 channels, on a CPU. "
        "[Performance](../performance.md) has what was measured, and on which devices."
    )
    return "\n".join([intro, "", *table(("framework", "implementation", "answer"), cells)])


@cache
def _costs() -> dict[str, Any]:
    """What ``docs/costs.py`` measured."""
    return dict(json.loads((DOCS / "costs.json").read_text(encoding="utf-8")))


def costs(name: str) -> str:
    """Time and memory of each implementation beside attention without positions."""
    if (found := _costs().get(name)) is None:
        return f"Not measured yet: `python docs/costs.py {name}` does it."
    frameworks = {"torch": "PyTorch, eager", "jax": "JAX, `jit`"}
    cells = [
        (framework, f"`{one}`{', by `auto`' if cost.get('auto') else ''}", *_cells(cost))
        for key, framework in frameworks.items()
        for one, cost in found[key].items()
    ]
    how = found["measured"]
    intro = (
        "Time divided by that of the framework's own attention without positions: 2 takes twice as "
        f"long. {how['call']}; one core of {how['processor']}; {how['versions']}; {how['date']}. "
        "[How it is measured](../performance.md#what-each-scheme-costs)."
    )
    if Hook.EMBEDDING in scheme_of(name).hooks():
        intro += " An embedding is added once for a model, and is not in these figures."
    heads = ("framework", "implementation", "forward", "step", "memory of a step")
    return "\n".join([intro, "", *table(heads, cells)])


def _cells(cost: dict[str, Any]) -> tuple[str, str, str]:
    """Both ratios and the memory of one implementation, or why there is none."""
    forward, step = (str(cost.get(stage, cost.get("why"))) for stage in ("forward", "step"))
    memory = "{:.3g} ({:.3g})".format(*cost["memory of step"]) if "memory of step" in cost else ""
    return forward, step, memory


@cache
def answers_of_all() -> dict[str, dict[str, dict[str, list[str]]]]:
    """By scheme, framework and answer: the implementations; kept while the sources are these."""
    kept, now = FOLDER / ".answers.json", digest("posenc", "backends")
    if kept.is_file():
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["digest"] == now:
            return dict(found["answers"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # embeddings add nothing to attention
        answers = {
            name: {"PyTorch": _grouped(_of_torch(name)), "JAX": _grouped(_of_jax(name))}
            for name in names()
        }
    kept.write_text(json.dumps({"digest": now, "answers": answers}), encoding="utf-8")
    return answers


def _grouped(answers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for implementation, answer in answers:
        found.setdefault(answer, []).append(implementation)
    return found


def _asked(
    explain: Callable[..., Any], implementations: Sequence[str]
) -> Iterator[tuple[str, str]]:
    chosen = explain("auto")["implementation"]
    for implementation in implementations:
        try:
            explain(implementation)
        except NotImplementedError as error:
            yield implementation, "no: " + _reason(str(error), implementation)
        else:
            taken = implementation == chosen
            yield implementation, "yes; `auto` takes it here" if taken else "yes, by name"


def _reason(text: str, implementation: str) -> str:
    return text.partition(f"{implementation!r} cannot serve this call: ")[2] or text


def _of_torch(name: str) -> Iterator[tuple[str, str]]:
    torch = importlib.import_module("torch")
    posenc_torch = importlib.import_module("posenc_torch")
    scheme = scheme_of(name)
    q = torch.zeros(1, 8, 2048, 64)
    tensors = posenc.init_params(scheme)
    params = {n: torch.as_tensor(a, dtype=torch.float32) for n, a in tensors.items()}
    tokens = posenc.Tokens(x=torch.zeros(1, 2048, 512))

    def explain(implementation: str) -> Any:
        return posenc_torch.explain(
            q, q, q, scheme, params, causal=True, tokens=tokens, implementation=implementation
        )

    return _asked(explain, posenc_torch.IMPLEMENTATIONS)


def _of_jax(name: str) -> Iterator[tuple[str, str]]:
    numpy = importlib.import_module("jax.numpy")
    posenc_jax = importlib.import_module("posenc_jax")
    scheme = scheme_of(name)
    q = numpy.zeros((1, 2048, 8, 64))
    params = {n: numpy.asarray(a, "float32") for n, a in posenc.init_params(scheme).items()}
    tokens = posenc.Tokens(x=numpy.zeros((1, 2048, 512)))

    def explain(implementation: str) -> Any:
        return posenc_jax.explain(
            q, q, q, scheme, params, causal=True, tokens=tokens, implementation=implementation
        )

    return _asked(explain, posenc_jax.IMPLEMENTATIONS)


def digest(*folders: str) -> str:
    """A digest of the sources in these folders."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()
