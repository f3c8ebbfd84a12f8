"""Before the first call: schemes from the catalogue, and whole processes."""

from __future__ import annotations

import subprocess
import sys

import posenc
from suite import DIM, HEADS, SOME, OneThread, Timed, warm
from suite.frameworks import FRAMEWORKS


class Make(OneThread):
    """A scheme from the catalogue; RoPE computes its frequencies with 60 digits."""

    param_names = ("scheme",)
    params = (SOME,)

    @warm
    def setup(self, name):
        pass

    def time_make(self, name):
        posenc.make(name, num_heads=HEADS, head_dim=DIM, max_len=1024, train_len=64)


class Import(Timed):
    """A new process that imports a package, beside one that imports what the package needs.

    ``posenc`` takes at most 1.5 of ``numpy``.
    """

    param_names = ("package",)
    params = (
        ["numpy", "posenc", *(p for n in FRAMEWORKS if n != "numpy" for p in (n, f"posenc_{n}"))],
    )

    @warm
    def setup(self, package):
        pass

    def time_import(self, package):
        _python("-c", f"import {package}")


class Command(Timed):
    """``posenc`` on the command line, without a study; ``--help`` takes under 0.2 s."""

    param_names = ("command",)
    params = (["--help", "list"],)

    @warm
    def setup(self, command):
        pass

    def time_command(self, command):
        _python("-m", "posenc", *command.split())


def _python(*arguments):
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
