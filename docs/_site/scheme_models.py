"""Which plans of published models have a scheme."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from scheme_facts import MODEL_SIZES, names, scheme_of

from posenc.cli.pages import signature_of
from posenc.schemes.sizes import SIZES


def models_of(name: str) -> str:
    """Plans of released models in which the scheme stands."""
    found = models().get(name, [])
    if not found:
        return ""
    links = ", ".join(f"{{py:obj}}`~posenc.presets.{plan}`" for plan in found)
    return f"[Plans of published models](../api/posenc.presets.md) with it: {links}."


@cache
def models() -> dict[str, list[str]]:
    """The names of the plans with each scheme of the catalogue."""
    from posenc import presets

    kinds = {_kind(scheme_of(name)): name for name in names()}
    found: dict[str, list[str]] = {}
    for plan in presets.__all__:
        maker = getattr(presets, plan)
        if not inspect.isfunction(maker) or plan in ("from_hf_config", "rnope", "swan", "irope"):
            continue
        needed = signature_of(inspect.unwrap(maker)).parameters.values()
        sizes = {p.name: MODEL_SIZES.get(p.name, 32) for p in needed if p.default is p.empty}
        made = maker(**{n: v for n, v in sizes.items() if n in SIZES})
        schemes = getattr(made, "schemes", (made,))
        for kind in {_kind(part) for scheme in schemes for part in _parts(scheme)}:
            if kind in kinds:
                found.setdefault(kinds[kind], []).append(plan)
    return found


def _parts(scheme: Any) -> Iterator[Any]:
    """The schemes that a sum or a wrapper is made of, and a wrapper itself."""
    inner = getattr(scheme, "schemes", None) or getattr(scheme, "scheme", None)
    if inner is None or type(scheme).__name__ == "Sink":
        yield scheme
    for part in inner if isinstance(inner, tuple | list) else (inner,):
        if part is not None:
            yield from _parts(part)


def _kind(scheme: Any) -> tuple[object, ...]:
    scaling = getattr(scheme, "scaling", None)
    kind = getattr(scheme, "kind", None) if type(scheme).__name__ == "Kerple" else None
    return type(scheme), type(scaling), kind
