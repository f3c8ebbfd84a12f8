"""A caller's bias of 0 and ``-inf`` is a mask: it is read as one where its values can be read.

Masks are one byte per pair, and their own path computes less for each head.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from posenc import Mask
from posenc.backend import Call
from posenc_torch.booleans import all_of
from posenc_torch.tracing import may_read


def as_mask(call: Call) -> Call:
    """The same call, with a mask in place of a bias that only hides; no other layer has it."""
    bias = call.extra_bias
    if bias is None or bias.requires_grad or not may_read(bias) or bias.numel() == 0:
        return call
    # Most other biases show what they are in the last row.
    if not _only_hides(bias[:1, :1, -1:]) or not _only_hides(bias):
        return call
    return _masked(call, bias == 0)


def _only_hides(bias: Tensor) -> bool:
    return bool(all_of((bias == 0) | (bias == -math.inf)).item())


def _masked(call: Call, shown: Tensor) -> Call:
    regions = tuple(_masked(region, shown) for region in call.regions)
    mask = call.mask & Mask(array=shown)
    return replace(call, extra_bias=None, mask=mask, regions=regions, shared=None)
