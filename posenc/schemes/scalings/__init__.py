"""Scalings of RoPE's frequencies, one file per idea."""

from posenc.schemes.scalings.clip_hann import ClipHann
from posenc.schemes.scalings.clip_period import ClipPeriod
from posenc.schemes.scalings.dynamic_ntk import DynamicNTK
from posenc.schemes.scalings.fractional import Fractional
from posenc.schemes.scalings.llama3 import Llama3
from posenc.schemes.scalings.longrope import LongRoPE
from posenc.schemes.scalings.ntk import NTK
from posenc.schemes.scalings.ntk_mixed import NTKMixed
from posenc.schemes.scalings.pi import PI
from posenc.schemes.scalings.proportional import Proportional
from posenc.schemes.scalings.scaling import Scaling
from posenc.schemes.scalings.yarn import YaRN

__all__ = [
    "NTK", "PI", "ClipHann", "ClipPeriod", "DynamicNTK", "Fractional", "Llama3", "LongRoPE",
    "NTKMixed", "Proportional", "Scaling", "YaRN",
]  # fmt: skip
