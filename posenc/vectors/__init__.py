"""Golden vectors: inputs, options, results and tolerances of schemes, for other languages."""

from __future__ import annotations

from posenc.vectors.files import FORMAT, write

__all__ = ["FORMAT", "write"]
