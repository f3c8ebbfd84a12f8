"""The last line of a terminal, rewritten while a study works; in a log there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

_ERASE = "\r\x1b[2K"


class LiveLine:
    """Prints lines for good, and below them one that the next replaces.

    Where the stream is no terminal, or one without cursor (``TERM=dumb``), ``show`` is None and
    progress comes as plain lines.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._is_shown = False
        able = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self.show: Callable[[str], None] | None = self._show if able else None

    def print(self, text: str) -> None:
        """Print a line for good."""
        self.clear()
        print(text, file=self._stream)

    def clear(self) -> None:
        """Remove the line, before anything else writes."""
        if self._is_shown:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._is_shown = False

    def _show(self, text: str) -> None:
        self._stream.write(_ERASE + text)
        self._stream.flush()
        self._is_shown = True
