"""A call of attention, checked and completed: where every path begins."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from array_api_compat import array_namespace, device

from posenc.checks import check_finite, check_flag, check_scheme, check_window
from posenc.evaluate import (
    attention_part,
    bias_tile,
    column,
    embeds_only,
    is_gated,
    row,
    transform,
    transforms,
)
from posenc.gates import coordinates
from posenc.params import check_params, head_count, is_floating, merged, named, working_dtype
from posenc.positions import as_integers, as_positions, visible
from posenc.protocol import Array, Namespace, PositionScheme, SchemeWarning

SWAPPED = (
    "are the axes of heads and tokens swapped? NumPy and PyTorch take (B, H, L, D), "
    "JAX (B, L, H, D)"
)


@dataclass(frozen=True)
class Call:
    """One call of attention, checked and completed: what every path computes from.

    Attributes
    ----------
    scheme, xp, dtype
        The scheme, the array namespace, and the working float.
    q, k, v
        ``(B, H, Q, D)``, ``(B, Hk, K, D)``, ``(B, Hk, K, Dv)``; q and k already transformed.
    arrays
        Learned params and constants, whole, in the working float.
    q_pos, k_pos
        Integers, ``(L,)`` or ``(B, L)``; ``aligned`` if they are the default.
    q_seg, k_seg
        Segments, or None.
    q_coords, k_coords
        Coordinates ``(B, H, L)`` of a gated scheme, or None.
    causal, window, scale
        As asked for; ``scale`` completed.
    skip_blocks
        Whether a path may leave out what ``posenc.negligible`` proves to round to nothing.
    """

    scheme: PositionScheme
    xp: Namespace
    dtype: Any
    q: Array
    k: Array
    v: Array
    arrays: Mapping[str, Array]
    q_pos: Array
    k_pos: Array
    aligned: bool
    q_seg: Array | None
    k_seg: Array | None
    q_coords: Array | None
    k_coords: Array | None
    causal: bool
    window: int | None
    scale: float
    skip_blocks: bool = True

    def bias(self) -> Array | None:
        """The whole bias, ``(B or 1, H or 1, Q, K)``, in the working float; None without one."""
        at: tuple[Array, Array]
        if self.q_coords is None:
            at = column(self.q_pos), row(self.k_pos)
        else:
            assert self.k_coords is not None
            at = self.q_coords[..., :, None], self.k_coords[..., None, :]
        return bias_tile(self.scheme, *at, self.arrays, dtype=self.dtype, xp=self.xp)

    def visible(self) -> Array | None:
        """Which query sees which key, ``(B or 1, 1, Q, K)`` booleans; None if each sees all."""
        segments = (None, None) if self.q_seg is None else (column(self.q_seg), row(self.k_seg))
        return visible(
            column(self.q_pos),
            row(self.k_pos),
            *segments,
            causal=self.causal,
            window=self.window,
        )

    def allowed_bias(self) -> tuple[Array | None, Array | None]:
        """Bias and visibility, with a bias of ``-inf`` turned into "not visible" and 0."""
        bias, seen = self.bias(), self.visible()
        if bias is None:
            return None, seen
        finite = bias != -math.inf
        seen = finite if seen is None else seen & finite
        return self.xp.where(finite, bias, 0.0), seen


def prepare(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    q_pos: Array | None = None,
    k_pos: Array | None = None,
    q_seg: Array | None = None,
    k_seg: Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    x: Array | None = None,
    q_coords: Array | None = None,
    k_coords: Array | None = None,
    skip_blocks: bool = True,
    xp: Namespace | None = None,
) -> Call:
    """The arguments of ``attention``, checked and completed: where every path begins."""
    xp = xp or namespace(q=q, k=k, v=v)
    check_scheme(scheme)
    check_shapes(q, k, v, xp=xp)
    heads, q_len, k_len = q.shape[1], q.shape[2], k.shape[2]
    declared = head_count(scheme)
    # Compared one by one: torch's compiler answers "in" wrongly for symbols.
    if declared is not None and declared != 1 and declared != heads:
        hint = f"; {SWAPPED}" if declared == q_len else ""
        raise ValueError(f"q has {heads} heads, the scheme num_heads={declared}: {scheme}{hint}")
    work = working_dtype([q, k, v, x, *named(params).values()], xp=xp)
    scheme, params = _in_attention(scheme, params, xp=xp)
    aligned = check_pair("q_pos", q_pos, "k_pos", k_pos)
    q_at, k_at = _aligned(q_len, k_len, q, xp) if aligned else (q_pos, k_pos)
    call = Call(
        scheme=scheme,
        xp=xp,
        dtype=work,
        q=q,
        k=k,
        v=v,
        arrays=merged(scheme, params, dtype=work, device=device(q), xp=xp),
        q_pos=q_at if aligned else as_positions("q_pos", q_at, device=device(q), xp=xp),
        k_pos=k_at if aligned else as_positions("k_pos", k_at, device=device(q), xp=xp),
        aligned=aligned,
        q_seg=None,
        k_seg=None,
        q_coords=None,
        k_coords=None,
        causal=check_flag("causal", causal),
        window=check_window(window),
        scale=check_finite("scale", scheme.scale(q.shape[3]) if scale is None else scale),
        skip_blocks=check_flag("skip_blocks", skip_blocks),
    )
    if not check_pair("q_seg", q_seg, "k_seg", k_seg):
        call = replace(
            call,
            q_seg=as_integers("q_seg", q_seg, device=device(q), xp=xp),
            k_seg=as_integers("k_seg", k_seg, device=device(q), xp=xp),
        )
    _check_lengths(call)
    if is_gated(scheme):
        call = _with_coordinates(call, x, params, q_coords, k_coords)
    elif q_coords is not None or k_coords is not None:
        raise ValueError(
            f"{type(scheme).__name__} has no gates; q_coords and k_coords are for FoX-like schemes"
        )
    if (advice := scheme.caution(causal=call.causal)) is not None:
        _warn(scheme, advice, xp)
    q = transform(scheme, q, call.q_pos, role="query", params=params, xp=xp)
    if not check_flag("k_transformed", k_transformed):
        k = transform(scheme, k, call.k_pos, role="key", params=params, xp=xp)
    elif aligned and transforms(scheme):
        _warn(scheme, _CACHE, xp)
    return replace(call, q=q, k=k)


_CACHE = (
    "k_transformed=True without q_pos and k_pos takes k for all keys from position 0 on; give the "
    "positions, or a cache that dropped its first keys is wrong"
)
_EMBEDS = (
    "it acts on token embeddings alone, so attention adds nothing; give it tokens to which "
    "posenc.embedding(scheme, pos) was added, and posenc.NoPE() here"
)


def _in_attention(
    scheme: PositionScheme, params: Mapping[str, Array] | None, *, xp: Namespace
) -> tuple[PositionScheme, Mapping[str, Array] | None]:
    """What attention needs of a scheme; that of an embedding is nothing, which is said."""
    if not embeds_only(scheme):
        return scheme, params
    if named(params):
        check_params(scheme, params, xp=xp)
    _warn(scheme, _EMBEDS, xp)
    return attention_part(scheme, params)


def _warn(scheme: PositionScheme, advice: str, xp: Namespace) -> None:
    """A ``SchemeWarning`` at the line of the caller; none while PyTorch compiles, which cannot."""
    compiler = getattr(xp, "compiler", None)
    if compiler is not None and compiler.is_compiling():
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_ours(frame):
        frame, level = frame.f_back, level + 1
    message = f"attention with {type(scheme).__name__}: {advice}"
    warnings.warn(message, SchemeWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0].startswith("posenc")


def namespace(**arrays: Array) -> Namespace:
    """The Array API namespace of all arrays."""
    for name, array in arrays.items():
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    return array_namespace(*arrays.values())


def check_shapes(q: Array, k: Array, v: Array, *, xp: Namespace) -> None:
    """Four axes each, floating, sizes that fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} must be an array, got {type(array).__name__}")
        if len(array.shape) != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {tuple(array.shape)}")
        if 0 in array.shape:
            raise ValueError(f"{name} has an axis of length 0: {tuple(array.shape)}")
        if not is_floating(array, xp):
            raise TypeError(f"{name} must be floating, of {xp.__name__}, got {array.dtype}")
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (B, H, L, D)"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v differ in batch size: {sizes}")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise ValueError(f"k and v differ in heads or length: {sizes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k differ in head_dim: {sizes}")
    if q.shape[1] % k.shape[1]:
        hint = f"; {SWAPPED}" if q.shape[2] % k.shape[2] == 0 else ""
        raise ValueError(f"the heads of q are no multiple of those of k and v: {sizes}{hint}")


def _aligned(q_len: int, k_len: int, like: Array, xp: Namespace) -> tuple[Array, Array]:
    if q_len > k_len:
        raise ValueError(
            f"q has length {q_len}, k only {k_len}: give q_pos and k_pos, the default aligns ends"
        )
    k_pos = xp.arange(k_len, dtype=xp.int32, device=device(like))
    return k_pos[k_len - q_len :], k_pos


def check_pair(q_name: str, q: Array | None, k_name: str, k: Array | None) -> bool:
    """Both or neither is given: True for neither; one alone is a ``ValueError``."""
    if (q is None) != (k is None):
        given, missing = (q_name, k_name) if k is None else (k_name, q_name)
        raise ValueError(f"{given} is given without {missing}; give both or neither")
    return q is None


def _check_lengths(call: Call) -> None:
    """Positions and segments fit q and k."""
    batch, q_len, k_len = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    sides = {"q_pos": q_len, "k_pos": k_len, "q_seg": q_len, "k_seg": k_len}
    heads = {"q": call.q.shape[1], "k": call.k.shape[1]}
    for name, length in sides.items():
        array = getattr(call, name)
        if array is None:
            continue
        if array.shape[-1] != length:
            hint = f"; {SWAPPED}" if array.shape[-1] == heads[name[0]] else ""
            raise ValueError(f"{name} has length {array.shape[-1]}, {name[0]} has {length}{hint}")
        if len(array.shape) == 2 and array.shape[0] != 1 and array.shape[0] != batch:
            raise ValueError(f"{name} has batch {array.shape[0]}, {name[0]} has {batch}")


def _with_coordinates(
    call: Call,
    x: Array | None,
    params: Mapping[str, Array] | None,
    q_coords: Array | None,
    k_coords: Array | None,
) -> Call:
    """Coordinates from hidden states, or as given."""
    xp, q_len = call.xp, call.q.shape[2]
    if check_pair("q_coords", q_coords, "k_coords", k_coords):
        if x is None:
            raise ValueError(
                f"{type(call.scheme).__name__} has gates: give the hidden states x (B, K, C) "
                "of the keys, or q_coords and k_coords"
            )
        if len(x.shape) != 3 or (x.shape[0], x.shape[1]) != (call.k.shape[0], call.k.shape[2]):
            expected = (call.k.shape[0], call.k.shape[2], "C")
            raise ValueError(f"x must be (B, K, C) = {expected}, got {tuple(x.shape)}")
        in_order = call.aligned and call.k_seg is None
        where = {} if in_order else {"pos": call.k_pos, "seg": call.k_seg}
        k_coords = coordinates(call.scheme, x, params, xp=xp, **where)
        if k_coords is None:
            return call
        if in_order:
            q_coords = k_coords[..., k_coords.shape[-1] - q_len :]
        else:
            q_coords = coordinates(
                call.scheme, x, params, xp=xp, **where, at_pos=call.q_pos, at_seg=call.q_seg
            )
    for name, coords, tokens in (("q_coords", q_coords, call.q), ("k_coords", k_coords, call.k)):
        if coords is None or not hasattr(coords, "shape"):
            raise TypeError(f"{name} must be an array (B, H, L), got {type(coords).__name__}")
        expected = (tokens.shape[0], call.q.shape[1], tokens.shape[2])
        if tuple(coords.shape) != expected:
            raise ValueError(f"{name} must be (B, H, L) = {expected}, got {tuple(coords.shape)}")
    return replace(
        call, q_coords=xp.astype(q_coords, call.dtype), k_coords=xp.astype(k_coords, call.dtype)
    )
