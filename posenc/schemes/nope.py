"""NoPE: no positional encoding. A causal mask alone lets a decoder tell order.

Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in
Transformers", arXiv 2305.19466.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from posenc.protocol import PositionScheme


@dataclass(frozen=True)
class NoPE(PositionScheme):
    """Nothing: attention sees content and the mask only.

    Kazemnejad et al. 2023, arXiv 2305.19466.
    """

    paper: ClassVar[str] = "Kazemnejad et al. 2023, arXiv 2305.19466"
