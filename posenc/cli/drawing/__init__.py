"""Pictures of schemes: ``draw``."""

from posenc.cli.drawing.page import draw

__all__ = ["draw"]
