"""NoPE: no positional encoding. A decoder can infer order from its causal mask.

Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in
Transformers", arXiv 2305.19466.
"""

from __future__ import annotations

from dataclasses import dataclass

from posenc.protocol import PositionScheme


@dataclass(frozen=True)
class NoPE(PositionScheme, paper="Kazemnejad et al. 2023, arXiv 2305.19466"):
    """No positional encoding: attention depends on content and the mask only.

    Kazemnejad et al. 2023, arXiv 2305.19466.
    """
