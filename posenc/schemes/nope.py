"""NoPE: no positional encoding. A decoder can infer order from its causal mask."""

from __future__ import annotations

from dataclasses import dataclass

from posenc.contract.protocol import PositionScheme


@dataclass(frozen=True)
class NoPE(PositionScheme, paper="Kazemnejad et al. 2023, arXiv 2305.19466"):
    """No positional encoding: attention depends on content and the mask only."""
