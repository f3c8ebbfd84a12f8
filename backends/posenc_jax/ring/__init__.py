"""Ring attention: a sequence is spread over the devices of a mesh axis, and keys are sent round.

Liu et al. 2023, arXiv 2310.01889. Every device attends from its own queries to the keys that it
holds, and sends those keys to the next device. This repeats until all keys have been everywhere.
The parts of each query's result are merged by their log-sum-exp. A scheme needs no code for this,
because positions travel with the keys.
"""

from posenc_jax.ring.api import ring_attention
from posenc_jax.ring.layout import zigzag

__all__ = ["ring_attention", "zigzag"]
