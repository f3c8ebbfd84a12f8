"""The public functions of attention in JAX, and the implementations that they choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc import PositionScheme
from posenc.backend import (
    Arguments,
    Call,
    Explanation,
    Implementation,
    LogSumExp,
    Mask,
    Operations,
    Planned,
    Refusal,
    Shared,
    Tokens,
    Window,
    advise_unknown,
    append_sink_key,
    as_mapping,
    check_equality,
    check_library,
    check_range,
    choose,
    concrete_values,
    dense,
    explain_choice,
    may_be_fully_masked,
    plan_unless,
    prepare,
    provide,
    public_lse,
    two_channels,
    working_dtype,
    zero_fully_masked,
)
from posenc_jax import folded
from posenc_jax.chunked import implementation as chunked
from posenc_jax.closures import as_of_now
from posenc_jax.fused import implementation as fused
from posenc_jax.fused.shapes import is_symbolic
from posenc_jax.hold import hold
from posenc_jax.meshes import is_spread, on_any_mesh, told_without_mesh
from posenc_jax.network import network
from posenc_jax.scan import scan_back
from posenc_jax.unfold import unfold

provide(
    Operations(
        hold=hold, unfold=unfold, network=network, scan_back=scan_back, sigmoid=lax.logistic,
        detach=lax.stop_gradient,
    ),
    xp=jnp,
)  # fmt: skip

# Above both limits "auto" skips "xla", and "chunked" computes scores in tiles. TILED_SCORES counts
# scores per head, for accelerators only, and is not measured on any yet. Decoding has few queries,
# whose scores take less memory than the keys.
TILED_SCORES, FEW_QUERIES = 2**18, 16


@advise_unknown
def attention(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    window: int | Window | None = None,
    mask: Mask | Array | Callable[..., Array] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    skip_blocks: bool = True,
    return_lse: bool = False,
) -> Any:
    """``softmax(scale * transform(q) @ transform(k).T + bias) @ v`` in the layout of ``jax.nn``.

    Tokens are axis 1 and heads axis 2, ``(B, L, H, D)``; ``posenc_torch`` takes ``(B, H, L, D)``.
    Works under ``jit``, ``grad`` and ``vmap``; the scheme is static, so it must be hashable.

    Parameters
    ----------
    q, k, v
        ``(B, Q, H, D)``, ``(B, K, Hk, D)``, ``(B, K, Hk, Dv)``; ``Hk`` divides ``H``, and head
        ``h`` uses key and value head ``h // (H // Hk)``.
    scheme, params
        The positional encoding and its learned arrays by name; ``init`` draws initial values.
    causal
        A query sees keys at ``k_pos <= q_pos`` only.
    window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
        As in ``posenc.attention``. Bias, mask and features keep the core's order of axes:
        ``(B, H, Q, K)`` and ``(B, H, L)``. A mask that is a function is static: a new function
        object compiles again, even if its code is the same. ``Tokens`` are pytrees.
    implementation
        One of ``IMPLEMENTATIONS``, or ``"auto"``: the first of them that serves the call well.

        ``"pallas"``: one kernel that computes the bias, for GPUs of capability 9.0 (JAX 0.11) and
        for TPUs. First derivatives in reverse mode.

        ``"xla"``: ``jax.nn.dot_product_attention`` with the whole bias. All derivatives.

        ``"chunked"``: memory ``O(L * block)`` on any device. First derivatives in reverse mode, and
        second ones in forward over reverse mode, as ``jax.hessian`` takes them.

        ``"folded"``: a key bias folded into the head dimension, for cuDNN.

        ``"reference"``: the definition at the highest precision of matrix products. All
        derivatives.

        A derivative that an implementation does not have raises ``NotImplementedError``, or, under
        ``vmap`` as in ``jax.jacfwd``, JAX's own ``TypeError`` of forward mode.
    skip_blocks
        Whether ``"pallas"``, and ``"chunked"`` on a CPU for about 1800 keys or more, skip blocks of
        keys whose weights provably round to nothing under a bias that decays
        (``posenc.attn.negligible``). If all values are finite, a result then changes by less than
        half a rounding of the largest value.

    Returns
    -------
    ``(B, Q, H, Dv)`` in q's dtype. A fully masked row is 0, with zero gradients. NaN in a token
    that is fully masked reaches no result, as in ``posenc.attention``, except with ``"pallas"``.
    With ``return_lse`` also the log-sum-exp ``(B, Q, H)``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    NotImplementedError
        The named implementation cannot serve the call; says why.
    """
    given = Arguments(
        window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
    )
    attend = partial(_attend, scheme, causal, implementation, skip_blocks)
    return on_any_mesh(attend, q, k, v, params, given.check())


def _attend(
    scheme: PositionScheme,
    causal: bool,
    implementation: str,
    skip_blocks: bool,
    q: Array,
    k: Array,
    v: Array,
    params: Mapping[str, Array] | None,
    given: Arguments,
) -> Any:
    call = prepare_call(
        q, k, v, scheme, params, causal, implementation, given, skip_blocks=skip_blocks
    )
    _, planned = choose(_IMPLEMENTATIONS, call, implementation)
    out, lse = planned.run(call)
    out = jnp.swapaxes(out, 1, 2).astype(_as_jax(q).dtype)
    return (out, jnp.swapaxes(public_lse(lse, call), 1, 2)) if call.wants_lse else out


@advise_unknown
def explain(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None = None,
    causal: bool = False,
    *,
    window: int | Window | None = None,
    mask: Mask | Array | Callable[..., Array] | None = None,
    tokens: Tokens | None = None,
    queries: Tokens | None = None,
    bias: Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    k_transformed: bool = False,
    implementation: str = "auto",
    skip_blocks: bool = True,
    return_lse: bool = False,
) -> Explanation:
    """Which implementation serves a call of ``attention``, and why the others do not.

    Arrays may be shapes, ``jax.ShapeDtypeStruct``: nothing is computed.

    Returns
    -------
    A dict that prints well: ``implementation``, the name, and ``others``, name -> reason.

    Raises
    ------
    As ``attention`` does.
    """
    given = Arguments(
        window, mask, tokens, queries, bias, softcap, scale, k_transformed, return_lse
    )

    def tell(
        q: Array, k: Array, v: Array, params: Mapping[str, Array] | None, given: Arguments
    ) -> Explanation:
        call = prepare_call(
            q, k, v, scheme, params, causal, implementation, given, skip_blocks=skip_blocks
        )
        return explain_choice(_IMPLEMENTATIONS, call, implementation)

    return told_without_mesh(tell, q, k, v, params, given.check())


def attend_in_pass(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    causal: bool,
    given: Arguments,
    implementation: str,
    skip_blocks: bool,
    shared: Shared,
) -> tuple[Any, Callable[[Array, Array, Array], Array] | None]:
    """``attention`` of a layer, and the same as a function of vectors alone, for other layers.

    The second is None unless calls of other layers differ in vectors alone.
    """
    if is_spread(q, k, v, params, given):  # what is made inside of a call stays there
        attend = partial(_attend, scheme, causal, implementation, skip_blocks)
        return on_any_mesh(attend, q, k, v, params, given), None
    call = prepare_call(
        q, k, v, scheme, params, causal, implementation, given,
        skip_blocks=skip_blocks, shared=shared,
    )  # fmt: skip
    kept = shared.keep(call)
    (_, planned), dtype = choose(_IMPLEMENTATIONS, call, implementation), _as_jax(q).dtype
    out, lse = planned.run(call)
    out = jnp.swapaxes(out, 1, 2).astype(dtype)
    if call.wants_lse:
        return (out, jnp.swapaxes(public_lse(lse, call), 1, 2)), None
    # "reference" computes in a wider dtype from the start.
    if not kept or implementation == "reference" or call.dtype == jnp.float64:
        return out, None
    turn_q, turn_k = (shared.made.find(("turn", role)) for role in ("query", "key"))
    like = shared.made.find("call")
    if like is None:
        return out, None

    def run(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
        q = q if turn_q is None else turn_q(q)
        k = k if turn_k is None else turn_k(k)
        result = planned.run(replace(like, q=q, k=k, v=v))[0]
        return jnp.swapaxes(result, 1, 2).astype(dtype)

    return out, run


def prepare_call(
    q: Array,
    k: Array,
    v: Array,
    scheme: PositionScheme,
    params: Mapping[str, Array] | None,
    causal: bool,
    implementation: str,
    given: Arguments,
    *,
    skip_blocks: bool = True,
    shared: Shared | None = None,
    gather: Callable[[Array], Array] | None = None,
) -> Call:
    """The checked call, in the core's layout ``(B, H, L, D)``; ``gather`` as in ``prepare``."""
    check_equality("scheme", scheme)
    q, k, v = (_heads_first(name, a) for name, a in (("q", q), ("k", k), ("v", v)))
    params = {name: _as_jax(array) for name, array in as_mapping(params).items()}
    given = given.check(jnp)
    given = given._replace(mask=as_of_now(given.mask))
    for side, own in (("tokens", given.of_keys), ("queries", given.of_queries)):
        for name in ("pos", "places"):  # before JAX narrows them to 32 bits
            if hasattr(values := getattr(own, name), "dtype"):
                check_range(f"{side}.{name}", values, jnp)
        _check_32_bits(f"{side}.seg", own.seg)
    given = given.map(_as_jax)
    work = working_dtype([q, k, v, *given.floats(), *params.values()], xp=jnp)
    if implementation == "reference" or work == jnp.float64:
        q, k, v = (a.astype(work) for a in (q, k, v))
    return prepare(
        q, k, v, scheme, params, causal, given,
        skip_blocks=skip_blocks, shared=shared, gather=gather, xp=jnp,
    )  # fmt: skip


def _check_32_bits(name: str, values: Any) -> None:
    """Refuse segments beyond 32 bits: JAX would drop upper bits, and two segments could merge."""
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined] # set by JAX at run time
        return
    known = concrete_values(values, jnp) if hasattr(values, "dtype") else None
    if known is None or not known.size:
        return
    if not np.issubdtype(known.dtype, np.integer):
        return  # prepare raises for it
    low, high = int(known.min()), int(known.max())
    if low < -(2**31) or high >= 2**31:
        wrong = low if low < -(2**31) else high
        raise ValueError(f"{name} holds {wrong}, accepted: 32 bits, unless jax_enable_x64 is set")


def _heads_first(name: str, array: Array) -> Array:
    """``(B, L, H, D)`` as ``(B, H, L, D)``."""
    if not hasattr(array, "shape"):
        raise TypeError(f"{name} must be an array, got {type(array).__name__}")
    if isinstance(array, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} must be an array, got a ShapeDtypeStruct; call it in jax.eval_shape, or ask "
            "posenc_jax.explain"
        )
    check_library(name, array, jnp)
    shape = tuple(array.shape)
    if len(shape) != 4:
        raise ValueError(f"{name} must be (B, L, H, D), got shape {shape}")
    if 0 in shape:
        raise ValueError(f"{name} has an axis of length 0: {shape}")
    return jnp.swapaxes(array, 1, 2)


def _as_jax(value: Any) -> Any:
    """An array in the dtype that JAX will compute in; unsigned positions become signed."""
    if isinstance(value, np.ndarray):
        value = jnp.asarray(value)
    if isinstance(value, Array) and jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        return value.astype(int)
    return value


def _xla(call: Call) -> tuple[Array, None]:
    bias, mask = call.bias_and_visible()
    q, k, v = call.q, call.k, call.v
    if mask is not None and may_be_fully_masked(call):
        q, k, v = zero_fully_masked(q, k, v, mask, xp=jnp)
    if call.sink is not None:
        k, v, bias, mask = append_sink_key(call, k, v, bias, mask)
    q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    scale, dim = call.scale, v.shape[3]
    if jax.default_backend() == "cpu":  # where products of half precision are no faster
        q, k, v = (a.astype(call.dtype) for a in (q, k, v))
    if q.dtype == call.dtype:  # scale q, as the definition does; half precision would round q
        q, scale = q * scale, 1.0
    q, k, v = (two_channels(a, jnp) for a in (q, k, v))
    sees = jnp.asarray(True) if mask is None else jnp.any(mask, axis=-1, keepdims=True)
    if mask is not None and bias is not None and call.extra_bias is not None:
        # jax.nn gives masked scores -2.4e38, and a caller's bias may be lower: -3.4e38 is a usual
        # way to mask. Without such a bias this would take 1.2 times as long.
        bias, mask = jnp.where(mask | ~sees, bias, -jnp.inf), None
    out = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=scale)[..., :dim]
    out = jnp.swapaxes(out, 1, 2)
    return jnp.where(sees, out, 0), None


def _plan_xla(call: Call) -> Planned | Refusal:
    without_lse = "that of jax.nn.dot_product_attention has no gradient"
    return plan_unless(_why_not_xla(call), Planned(_xla, without_lse, takes_sink=True))


def _why_not_xla(call: Call) -> str | None:
    q, k, v = call.q, call.k, call.v
    if call.dtype == jnp.float64:
        return "jax.nn.dot_product_attention takes its softmax in float32, the call is in float64"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if q.dtype == jnp.float16 and jax.default_backend() not in ("cpu", "gpu"):
        return "jax.nn.dot_product_attention takes float16 on GPUs only"
    if q.shape[3] != v.shape[3]:
        return f"q has head_dim {q.shape[3]}, v has {v.shape[3]}"
    if call.softcap is not None:
        return "jax.nn.dot_product_attention has no softcap"
    return None


def _xla_not_preferred(call: Call) -> str | None:
    q_len, k_len = call.q.shape[2], call.k.shape[2]
    if is_symbolic(call) or q_len <= FEW_QUERIES or isinstance(chunked.plan(call), Refusal):
        return None
    if jax.default_backend() == "cpu":
        return "on a CPU 'chunked' is faster, with one block or with many"
    if q_len * k_len < TILED_SCORES:
        return None
    return f"it would hold {q_len} * {k_len} scores per head; 'chunked' is faster"


def _reference(call: Call) -> tuple[Array, LogSumExp]:
    q, k, v = (a.astype(call.dtype) for a in (call.q, call.k, call.v))
    with jax.default_matmul_precision("highest"):
        return dense(replace(call, q=q, k=k, v=v))


_IMPLEMENTATIONS = (
    Implementation("pallas", fused.plan, fused.not_preferred),
    Implementation("xla", _plan_xla, _xla_not_preferred),
    Implementation("chunked", chunked.plan, decays=True, whole_rows=True),
    Implementation("folded", folded.plan, folded.not_preferred),
    Implementation("reference", lambda call: Planned(_reference), decays=True, whole_rows=True),
)
IMPLEMENTATIONS = tuple(implementation.name for implementation in _IMPLEMENTATIONS)
