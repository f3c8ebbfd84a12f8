"""Benchmarks of posenc. ``POSENC_SCHEMES`` names what they measure, or the whole catalogue is."""

from __future__ import annotations

import os

import posenc

NAMES = os.environ.get("POSENC_SCHEMES", "").split() or sorted(posenc.schemes())
