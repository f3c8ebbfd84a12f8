"""A key bias folded into the head dimension, for kernels that know no bias.

Where a bias is ``u(q) + w(k)``, a few more channels make it part of the product of queries and
keys: ``[1, u, q] . [w, 1, k] = w + u + q.k``, with ``w`` and ``u`` in several pairs of numbers.
Flash kernels, cuDNN and the like then serve ALiBi as if it were not there, with exact gradients.
``u = -w`` of a query's own key comes first, so that the large numbers cancel before anything is
added to them. A kernel that adds channels in another order rounds once more: in float32 by up to
``2**-24`` times slope times length.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from posenc.backend import (
    Call,
    bias_by_key,
    has_bias,
)
from posenc_torch.sdpa import has_native_visible, promoted

# Numbers of a dtype that together hold a bias: 2 of 24 bits, or 3 of 8 or 11. Fewer are wrong: one
# of bfloat16 is off by 3.5 at a thousand tokens, two by 1e-2.
_LIMBS = {torch.float64: 2, torch.float32: 2, torch.bfloat16: 3, torch.float16: 3}
_MULTIPLE = 8  # of channels, which kernels ask for
_UNITS = {torch.float16: 2.0**8}  # what float16 can hold ends at 65504


def folded(call: Call) -> tuple[Tensor, None]:
    """``(B, H, Q, Dv)`` by ``scaled_dot_product_attention`` without a mask."""
    q, k, v = promoted(call)
    batch, heads, q_len, dim = q.shape
    if k.shape[1] != heads:  # each head's keys carry its own bias
        k, v = (a.repeat_interleave(heads // a.shape[1], dim=1) for a in (k, v))
    # Exact in float64: float32 is off by 1e-4 where slope times position is a thousand.
    wide = {name: array.double() for name, array in call.arrays.items()}
    key = call.key.map_features(lambda array: array.double())
    keys = bias_by_key(replace(call, arrays=wide, dtype=torch.float64, key=key))
    assert keys is not None
    keys = (keys / call.scale).expand(batch, heads, -1)
    # What softmax cannot see makes near keys small, and their sums with q.k precise. Its gradient
    # is 0 but for rounding, which it takes off that of the keys.
    queries = -keys[..., keys.shape[-1] - q_len :]
    unit = _UNITS.get(q.dtype, 1.0)
    channels: list[tuple[Tensor, Tensor]] = []
    for of_key, of_query in zip(
        _limbs(keys / unit, q.dtype), _limbs(queries / unit, q.dtype), strict=True
    ):
        channels += [(torch.full_like(of_query, unit), of_key)]
        channels += [(of_query, torch.full_like(of_key, unit))]
    extra = [torch.stack(side, dim=-1) for side in zip(*channels, strict=True)]
    missing = -(dim + len(channels)) % _MULTIPLE
    q, k = (
        torch.nn.functional.pad(torch.cat([own, a], dim=-1), (0, missing))
        for own, a in zip(extra, (q, k), strict=True)
    )
    width = v.shape[3]
    if width == dim:  # some kernels want values as wide as keys
        v = torch.nn.functional.pad(v, (0, q.shape[3] - width))
    out = scaled_dot_product_attention(q, k, v, is_causal=q_len > 1, scale=call.scale)
    return out[..., :width], None


def refuses(call: Call) -> str | None:
    """Why a call has no bias that could be folded in."""
    name = type(call.scheme).__name__
    if not has_bias(call.scheme):
        return f"{name} has no bias to fold in"
    if call.query.places is not None:
        return "places are given, and a key bias holds for positions"
    if not call.causal:
        return "only under a causal mask a bias splits into one of queries and one of keys"
    if not (has_native_visible(call) and call.plain):
        return (
            "SDPA without a mask knows aligned positions, as many queries as keys or one, "
            "no window, no segments, no mask, bias or cap of the caller's and a scale above 0"
        )
    if (keys := bias_by_key(call)) is None:
        return f"{name} declares no key_bias"
    dtype = promoted(call)[0].dtype
    if keys.requires_grad and torch.finfo(dtype).bits < 32:
        return (
            f"the bias learns, and its gradient would be rounded to {dtype} before it is summed: "
            "sums that cancel lose all their digits"
        )
    return None


def avoided(call: Call) -> str:
    """Why ``"auto"`` passes by."""
    if call.q.device.type == "cpu":
        return "on a CPU SDPA in parts, with a mask, is faster"
    return "nobody measured it on a GPU yet"


def _limbs(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of a dtype whose sum is ``values``, the largest first; it takes the gradient."""
    first = values.to(dtype)
    found, rest = [first], (values - first).detach()
    while len(found) < _LIMBS[dtype]:
        found.append(rest.to(dtype))
        rest = rest - found[-1]
    return found
