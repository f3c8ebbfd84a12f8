"""What an audit writes: one format a module, each with ``write(records, judged, run) -> str``."""

from __future__ import annotations

from posenc.audit.outputs.run import Run

__all__ = ["Run"]
