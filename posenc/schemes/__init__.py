"""Positional encodings, one file per idea, each imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from posenc.contract.checks import nearest

if TYPE_CHECKING:
    from posenc.makers import catalogue, make
    from posenc.schemes.alibi import ALiBi
    from posenc.schemes.alibi_2d import ALiBi2D
    from posenc.schemes.axial_rope import AxialRoPE
    from posenc.schemes.bam import BAM
    from posenc.schemes.cable import CABLE
    from posenc.schemes.carope import CARoPE
    from posenc.schemes.chunk import Chunk
    from posenc.schemes.cope import CoPE
    from posenc.schemes.dape import DAPE
    from posenc.schemes.deberta import DeBERTa
    from posenc.schemes.dual_chunk import DualChunk
    from posenc.schemes.fire import FIRE
    from posenc.schemes.fope import FoPE
    from posenc.schemes.fox import FoX
    from posenc.schemes.grape_a import GRAPEA
    from posenc.schemes.grape_ap import GRAPEAP
    from posenc.schemes.head_slice import HeadSlice
    from posenc.schemes.inkling import Inkling
    from posenc.schemes.kerple import Kerple
    from posenc.schemes.learned import Learned
    from posenc.schemes.learned_rope import LearnedRoPE
    from posenc.schemes.log_scale import LogScale
    from posenc.schemes.mixed_rope import MixedRoPE
    from posenc.schemes.mrope import MRoPE
    from posenc.schemes.nope import NoPE
    from posenc.schemes.path import PaTH
    from posenc.schemes.pope import PoPE
    from posenc.schemes.relative_table import RelativeTable
    from posenc.schemes.repo import RePo
    from posenc.schemes.rerope import ReRoPE
    from posenc.schemes.rope import RoPE
    from posenc.schemes.sandwich import Sandwich
    from posenc.schemes.scalings import (
        NTK,
        PI,
        ClipHann,
        ClipPeriod,
        DynamicNTK,
        Fractional,
        Llama3,
        LongRoPE,
        NTKMixed,
        Proportional,
        Scaling,
        YaRN,
    )
    from posenc.schemes.selective_rope import SelectiveRoPE
    from posenc.schemes.self_extend import SelfExtend
    from posenc.schemes.shaw import Shaw
    from posenc.schemes.sink import Sink
    from posenc.schemes.sinusoidal import Sinusoidal
    from posenc.schemes.sum import Sum
    from posenc.schemes.t5 import T5Bias
    from posenc.schemes.tra import TRA
    from posenc.schemes.transformer_xl import TransformerXL
    from posenc.schemes.wall import Wall
    from posenc.schemes.wavelet import Wavelet
    from posenc.schemes.wrapper import Wrapper
    from posenc.schemes.xpos import XPos

__all__ = [
    "BAM", "CABLE", "DAPE", "FIRE", "GRAPEA", "GRAPEAP", "NTK", "PI", "TRA", "ALiBi", "ALiBi2D",
    "AxialRoPE", "CARoPE", "Chunk", "ClipHann", "ClipPeriod", "CoPE", "DeBERTa", "DualChunk",
    "DynamicNTK", "FoPE", "FoX", "Fractional", "HeadSlice", "Inkling", "Kerple", "Learned",
    "LearnedRoPE", "Llama3", "LogScale", "LongRoPE", "MRoPE", "MixedRoPE", "NTKMixed", "NoPE",
    "PaTH", "PoPE", "Proportional", "RePo", "ReRoPE", "RelativeTable", "RoPE", "Sandwich",
    "Scaling", "SelectiveRoPE", "SelfExtend", "Shaw", "Sink", "Sinusoidal", "Sum", "T5Bias",
    "TransformerXL", "Wall", "Wavelet", "Wrapper", "XPos", "YaRN", "catalogue", "make",
]  # fmt: skip

_MAKERS = ("catalogue", "make")  # of a room above, which is imported by name
# The module of each scheme.
MODULES = {
    "ALiBi": "alibi",
    "ALiBi2D": "alibi_2d",
    "AxialRoPE": "axial_rope",
    "BAM": "bam",
    "CABLE": "cable",
    "CARoPE": "carope",
    "Chunk": "chunk",
    "CoPE": "cope",
    "DAPE": "dape",
    "dape_on_alibi": "dape",
    "DeBERTa": "deberta",
    "DualChunk": "dual_chunk",
    "FIRE": "fire",
    "FoPE": "fope",
    "FoX": "fox",
    "GRAPEA": "grape_a",
    "GRAPEAP": "grape_ap",
    "HeadSlice": "head_slice",
    "Inkling": "inkling",
    "Kerple": "kerple",
    "Learned": "learned",
    "LearnedRoPE": "learned_rope",
    "LogScale": "log_scale",
    "MixedRoPE": "mixed_rope",
    "MRoPE": "mrope",
    "NoPE": "nope",
    "PaTH": "path",
    "PoPE": "pope",
    "RelativeTable": "relative_table",
    "RePo": "repo",
    "ReRoPE": "rerope",
    "RoPE": "rope",
    "Sandwich": "sandwich",
    "NTK": "scalings",
    "PI": "scalings",
    "ClipHann": "scalings",
    "ClipPeriod": "scalings",
    "DynamicNTK": "scalings",
    "Fractional": "scalings",
    "Llama3": "scalings",
    "LongRoPE": "scalings",
    "NTKMixed": "scalings",
    "Proportional": "scalings",
    "Scaling": "scalings",
    "YaRN": "scalings",
    "SelectiveRoPE": "selective_rope",
    "SelfExtend": "self_extend",
    "Shaw": "shaw",
    "Sink": "sink",
    "sink_alone": "sink",
    "Sinusoidal": "sinusoidal",
    "Sum": "sum",
    "T5Bias": "t5",
    "TRA": "tra",
    "TransformerXL": "transformer_xl",
    "Wall": "wall",
    "Wavelet": "wavelet",
    "Wrapper": "wrapper",
    "XPos": "xpos",
}


if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> Any:
        """A scheme, whose file is imported when it is asked for."""
        if name not in __all__:
            advice = "" if name.startswith("_") else nearest(name, __all__)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
        found = globals()[name] = _here(name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _here(name: str) -> Any:
    """A class or function; its file is imported."""
    home = "posenc.makers" if name in _MAKERS else f"{__name__}.{MODULES[name]}"
    return getattr(importlib.import_module(home), name)
