"""Start-up time of whole processes, against a baseline."""

from __future__ import annotations

import subprocess
import sys

from suite import Timed


def _python(*arguments):
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


class Start(Timed):
    """``import posenc``: within 1.5 of ``import numpy``. ``posenc --help``: under 0.2 s."""

    def time_import_numpy(self):
        _python("-c", "import numpy")

    def time_import_posenc(self):
        _python("-c", "import posenc")

    def time_help(self):
        _python("-m", "posenc", "--help")
