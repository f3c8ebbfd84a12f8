"""Schemes of the catalogue, as their pages see them: names, titles, sizes, and files."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import posenc
from posenc.makers import maker_of

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
FOLDER = DOCS / "schemes"
MODEL_SIZES = {"num_heads": 8, "head_dim": 64, "dim": 512, "max_len": 128}


@cache
def facts() -> dict[str, dict[str, Any]]:
    """What ``schemes.toml`` says of each name."""
    return tomllib.loads((DOCS / "_site" / "schemes.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """The names of the catalogue that are posenc's own."""
    return [n for n, maker in posenc.catalogue().items() if _home(maker).startswith("posenc.")]


def _home(maker: Callable[..., Any]) -> str:
    return str(inspect.unwrap(maker).__module__)


def scheme_of(name: str) -> posenc.PositionScheme:
    """A scheme of the sizes that pages use."""
    return posenc.make(name, **MODEL_SIZES, train_len=32, hidden_dim=512)


def source_of(name: str) -> str:
    """The file of a scheme, from the root of the repository."""
    maker = maker_of(name)
    parts = [v for v in getattr(maker, "preset", {}).values() if isinstance(v, type)]
    source = parts[-1] if parts else inspect.unwrap(maker)
    return Path(inspect.getsourcefile(source) or "").resolve().relative_to(ROOT).as_posix()


@cache
def pages_of_files() -> dict[str, str]:
    """The page of each scheme's file: that of the first name."""
    found: dict[str, str] = {}
    for name in sorted(names()):
        found.setdefault(source_of(name), name)
    return found
