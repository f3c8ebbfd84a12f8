"""A key bias folded into the head dimension, for kernels that take no bias.

If a bias is ``u(q) + w(k)``, a few more channels make it part of the product of queries and keys:
``[1, u, q] . [w, 1, k] = w + u + q.k``. Each of ``w`` and ``u`` is a sum of several numbers of q's
dtype, one per channel. ``u`` is ``-w`` of the query's own key: softmax ignores it, and near keys
then have a small bias. These channels come first, so that the large numbers cancel before anything
is added to them. A kernel that adds channels in another order rounds once more: in float32 by up to
``2**-24`` times slope times length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from posenc.apply.bias import has_bias
from posenc.attn.bias_forms import bias_by_key
from posenc.attn.call import Call
from posenc.contract.operations import device
from posenc.contract.protocol import Array, Namespace

Rounded = Callable[[Array, Any], Array]  # see fold_key_bias
_LEAST_SCALE = 2.0**-40  # a bias of a slope of 1 at the last position, 2**30, is then 2**70
_MULTIPLE = 8  # kernels need head dimensions that are multiples of this


def why_not_foldable(call: Call) -> str | None:
    """Why a call has no bias that can be folded; None if it has one."""
    name = type(call.scheme).__name__
    if not has_bias(call.scheme):
        return f"{name} has no bias to fold in"
    if call.query.places is not None:
        return "places are given, and a key_bias holds for positions only"
    if not call.causal:
        return "a bias splits into u(q) + w(k) only under a causal mask"
    if abs(call.scale) < _LEAST_SCALE:
        return f"the bias is divided by scale={call.scale:.3g}, and would overflow"
    if call.extra_bias is None and bias_by_key(call) is None:
        return f"{name} declares no key_bias"
    return None


def fold_key_bias(
    q: Array,
    k: Array,
    bias: Array,
    *,
    detach: Callable[[Array], Array] = lambda array: array,
    rounded: Rounded | None = None,
    xp: Namespace,
) -> tuple[Array, Array]:
    """Queries and keys with more channels, which add the bias to their product.

    Parameters
    ----------
    q, k
        ``(B, H, Q, D)`` and ``(B, H, K, D)`` of one dtype; the queries are the last of the keys.
    bias
        ``w(k) / scale`` of every key, ``(B, H, K)``, in float32 or wider.
    detach
        Stops the gradient of an array. The first number of a bias then takes all of the gradient.
    rounded
        Rounds the values of an array to a dtype, and keeps its own. By default it converts them
        there and back, which XLA on a GPU and Inductor leave out: they give something else.

    Returns
    -------
    Both with ``folded_width(D)`` channels: those of the bias, then their own, then zeros.
    """
    dtype, count = q.dtype, _limb_count(q.dtype, xp)
    unit = _unit(dtype, xp)
    q_channels: list[Array] = []
    k_channels: list[Array] = []
    own = bias[..., bias.shape[-1] - q.shape[2] :]
    if rounded is None:
        rounded = partial(_there_and_back, xp)
    of_keys = _limbs(bias / unit, dtype, count, detach, rounded, xp)
    of_queries = _limbs(-own / unit, dtype, count, detach, rounded, xp)
    for of_key, of_query in zip(of_keys, of_queries, strict=True):
        q_channels += [xp.full_like(of_query, unit), of_query]
        k_channels += [of_key, xp.full_like(of_key, unit)]
    missing = folded_width(q.shape[3], dtype, xp=xp) - q.shape[3] - len(q_channels)
    return _with_channels(q_channels, q, missing, xp), _with_channels(k_channels, k, missing, xp)


def folded_width(dim: int, dtype: Any, *, xp: Namespace) -> int:
    """The head dimension after a bias is folded in."""
    return -(-(dim + 2 * _limb_count(dtype, xp)) // _MULTIPLE) * _MULTIPLE


def _limb_count(dtype: Any, xp: Namespace) -> int:
    """How many numbers of a dtype hold one bias: 2 in float32 and float64, 3 in half precision.

    Fewer are too inaccurate: one bfloat16 number is off by 3.5 at a thousand tokens, two by 1e-2.
    """
    return 2 if xp.finfo(dtype).bits >= 32 else 3


def _unit(dtype: Any, xp: Namespace) -> float:
    """The unit of a stored bias: slope times length may exceed float16's largest number, 65504."""
    return 2.0**8 if float(xp.finfo(dtype).max) < 2.0**16 else 1.0


def _limbs(
    values: Array,
    dtype: Any,
    count: int,
    detach: Callable[[Array], Array],
    rounded: Rounded,
    xp: Namespace,
) -> list[Array]:
    """Numbers of a dtype whose sum is ``values``, the largest first."""
    limbs: list[Array] = []
    for _ in range(count):
        fixed = detach(values)
        limb = rounded(fixed, dtype)
        # It is ``limb``, exactly, and has the gradient of ``values``.
        limbs.append(xp.astype(values + (limb - fixed), dtype, copy=False))
        values = fixed - limb
    return limbs


def _there_and_back(xp: Namespace, values: Array, dtype: Any) -> Array:
    return xp.astype(xp.astype(values, dtype, copy=False), values.dtype, copy=False)


def _with_channels(channels: list[Array], array: Array, missing: int, xp: Namespace) -> Array:
    """``array (B, H, L, D)`` with channels before its own, and zeros after them."""
    parts = [xp.stack(channels, axis=-1), array]
    if missing:
        shape = (*array.shape[:3], missing)
        parts.append(xp.zeros(shape, dtype=array.dtype, device=device(array)))
    return xp.concat(parts, axis=-1)
