"""Models that exist, probed: losses by length and position, passkeys, distances of attention.

``probe(logits, tokens, eval_lens)`` measures any function from tokens to logits; ``posenc probe``
measures models in folders, also under other schemes.
"""

from posenc.probe.api import Probed, probe
from posenc.probe.losses import CELLS, losses_of
from posenc.probe.schemes import rope_in
from posenc.probe.text import Text, byte_lengths

__all__ = ["CELLS", "Probed", "Text", "byte_lengths", "losses_of", "probe", "rope_in"]
