"""Whether a framework is there. One that POSENC_REQUIRE_BACKENDS names must be."""

from __future__ import annotations

import os
from importlib.util import find_spec


def require(name: str) -> bool:
    """True if installed; an error if it is required and missing."""
    installed = find_spec(name) is not None
    if not installed and name in os.environ.get("POSENC_REQUIRE_BACKENDS", "").split(","):
        raise ImportError(f"POSENC_REQUIRE_BACKENDS asks for {name}, which is not installed")
    return installed
