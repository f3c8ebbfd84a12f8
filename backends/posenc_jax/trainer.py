"""The study's decoder in JAX: float32, many training steps in one compiled call."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc import Tokens
from posenc.backend import (
    LayerPlan,
    embedding,
)
from posenc.study import (
    ADAM_EPSILON,
    BETAS,
    NO_ANSWER,
    NORM_EPSILON,
    Decoder,
    Layers,
    embedding_scale,
    has_weight_decay,
)
from posenc_jax.bound import Attend
from posenc_jax.position import Positions

_TOKENS = 2048  # in one evaluation batch
_PREFIXES = ("", "optimizer.first.", "optimizer.second.")  # of params and moments in a state


class Trainer:
    """Trains and scores one decoder; see ``posenc.study.Trainer``."""

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        if scratch is not None:
            _share_compilations(scratch)
        name = None if device == "auto" else device
        self._device = jax.devices(name)[0]
        self._decoder = decoder
        params = {"weights": decoder.weights, "position": list(decoder.position)}
        self._params = jax.device_put(params, self._device)
        zeros = jax.tree.map(jnp.zeros_like, self._params)
        self._moments = [zeros, jax.tree.map(jnp.copy, zeros)]
        self._steps = 0
        self.gradient_norms: Any = np.zeros(0, np.float32)

    def train(
        self, tokens: Any, labels: Any, rates: Any, positions: Any = None, plan: Any = None
    ) -> Any:
        counts = np.arange(self._steps + 1, self._steps + 1 + len(rates), dtype=np.float32)
        self._steps += len(rates)
        if positions is not None:
            positions = positions.astype(np.float32 if positions.dtype.kind == "f" else np.int32)
        batches = tokens.astype(np.int32), labels.astype(np.int32), positions
        inputs = jax.device_put((*batches, rates.astype(np.float32), counts), self._device)
        static, layers = _Static(self._decoder), self._decoder.layers(plan)
        state = (self._params, *self._moments)
        (self._params, *self._moments), found = _train(static, layers, state, inputs)
        losses, self.gradient_norms = map(np.asarray, found)
        return losses

    def answers(self, tokens: Any, labels: Any, window: int | None, plan: Any = None) -> Any:
        parts = self._by_batch(_score, (tokens, labels), window, plan)
        losses, hits = (np.concatenate(each)[: len(tokens)] for each in zip(*parts, strict=True))
        return losses, hits

    def logits(self, tokens: Any, window: int | None = None, plan: Any = None) -> Any:
        parts = self._by_batch(_logits_of_batch, (tokens,), window, plan)
        return np.concatenate(parts)[: len(tokens)]

    def _by_batch(self, program: Any, arrays: Any, window: int | None, plan: Any) -> list[Any]:
        """The program's results for batches of rows, the last filled up with rows of zeros.

        All batches have one shape, so that every protocol and seed runs the same compiled program.
        """
        rows, length = arrays[0].shape
        layers = self._decoder.layers(plan, length=length, window=window)
        size, static = max(1, _TOKENS // length), _Static(self._decoder)
        filled = [np.pad(a, ((0, -rows % size), (0, 0))).astype(np.int32) for a in arrays]
        parts = zip(*(np.split(a, len(a) // size) for a in filled), strict=True)
        return [program(static, layers, self._params, *part) for part in parts]

    def state(self) -> dict[str, Any]:
        found = {"optimizer.step": np.array(self._steps)}
        for prefix, tree in zip(_PREFIXES, (self._params, *self._moments), strict=True):
            found |= {prefix + name: np.array(a) for name, a in _by_name(tree).items()}
        return found

    def load_state(self, state: Any) -> None:
        def restored(prefix: str) -> Any:
            names = _by_name(self._params)
            leaves = [jnp.asarray(state[prefix + name]) for name in names]
            return jax.device_put(jax.tree.unflatten(structure, leaves), self._device)

        structure = jax.tree.structure(self._params)
        self._params, *self._moments = map(restored, _PREFIXES)
        self._steps = int(state["optimizer.step"])

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__, "device": self._device.device_kind}


def _by_name(tree: Any) -> dict[str, Array]:
    """The arrays of a tree like that of the params, in its order: ``position.0.table``."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}


def _share_compilations(folder: Path) -> None:
    """Reuse the programs that another process of the study compiled."""
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in options.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]  # untyped in JAX


class _Static:
    """A decoder as a static argument: equal for all seeds, which run one compiled program."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._key = (decoder.recipe.training(), decoder.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _train(static: _Static, layers: Layers, state: Any, inputs: Any) -> Any:
    """Steps of AdamW, one after another; the new state, the losses and the gradients' norms."""
    decoder, recipe = static.decoder, static.decoder.recipe
    b1, b2 = BETAS

    def mean_loss(params: Any, tokens: Array, labels: Array, pos: Array | None) -> Array:
        losses, _ = _losses(decoder, layers, params, tokens, labels, pos)
        return losses.sum() / (labels != NO_ANSWER).sum()

    def step(state: Any, inputs: Any) -> Any:
        params, first, second = state
        tokens, labels, pos, step_rate, count = inputs
        loss, gradient = jax.value_and_grad(mean_loss)(params, tokens, labels, pos)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, recipe.clip / norm), gradient)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, gradient)

        def update(path: Any, p: Array, m: Array, v: Array) -> Any:
            positional = path[0].key == "position"
            decays = not positional and has_weight_decay(path[1].key)
            decay = recipe.weight_decay if decays else 0.0
            factor = recipe.position_lr_scale if positional else 1.0
            denominator = jnp.sqrt(v / (1 - b2**count)) + ADAM_EPSILON
            return p - step_rate * factor * (decay * p + m / (1 - b1**count) / denominator)

        params = jax.tree_util.tree_map_with_path(update, params, first, second)
        return (params, first, second), (loss, norm)

    return lax.scan(step, state, inputs)


@partial(jax.jit, static_argnums=(0, 1))
def _score(
    static: _Static, layers: Layers, params: Any, tokens: Array, labels: Array
) -> tuple[Array, Array]:
    """Losses of one batch ``(rows, length)``, and whether the likeliest token is the label."""
    losses, logits = _losses(static.decoder, layers, params, tokens, labels)
    return losses, jnp.argmax(logits, axis=-1) == labels


@partial(jax.jit, static_argnums=(0, 1))
def _logits_of_batch(static: _Static, layers: Layers, params: Any, tokens: Array) -> Array:
    return _logits(static.decoder, layers, params, tokens)


def _losses(
    decoder: Decoder, layers: Layers, params: Any, tokens: Array, labels: Array,
    pos: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Losses ``(N, T)`` of the answers, 0 for none, and the logits; by default at 0, 1, ..."""
    logits = _logits(decoder, layers, params, tokens, pos)
    of_label = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - of_label
    return jnp.where(labels == NO_ANSWER, 0, losses), logits


def _logits(
    decoder: Decoder, layers: Layers, params: Any, tokens: Array, pos: Array | None = None
) -> Array:
    """``(N, T, V)``."""
    w, recipe = params["weights"], decoder.recipe
    x = w["embed"][tokens] * embedding_scale(recipe)
    at = jnp.arange(tokens.shape[1]) if pos is None else pos
    for layer in layers.embedding:
        own = _own_params(layers, layer, params)
        term = embedding(layers.schemes[layer], at, own, xp=jnp)
        x = x if term is None else x + term
    for layer, attend in enumerate(_positions(layers, params).bind(Tokens(pos), causal=True)):
        x = _layer(x, w, layer, recipe.heads, attend)
    head = w["head"] if "head" in w else w["embed"].T
    return _linear(_norm(x, w["norm"]), head)


def _own_params(layers: Layers, layer: int, params: Any) -> dict[str, Array]:
    """The learned arrays of the layer that its scheme needs."""
    own = params["position"][layers.owners[layer]]
    return {name: own[name] for name in layers.schemes[layer].param_specs()}


def _positions(layers: Layers, params: Any) -> Positions:
    """The schemes, windows and learned arrays of the layers, as a model has them."""
    plan = LayerPlan(tuple(layers.schemes), tuple(layers.windows))
    own = {str(layer): _own_params(layers, layer, params) for layer in plan.first_layers}
    return Positions(plan, own)


def _layer(x: Array, w: Any, layer: int, heads: int, attend: Attend) -> Array:
    hidden = _norm(x, w[f"{layer}.norm1"])
    qkv = _linear(hidden, w[f"{layer}.qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    q, k, v = (qkv[:, :, n] for n in range(3))
    out = attend(q, k, v, x=hidden)
    x = x + _linear(out.reshape(x.shape), w[f"{layer}.out"])
    hidden = _norm(x, w[f"{layer}.norm2"])
    up = jax.nn.gelu(_linear(hidden, w[f"{layer}.up"]), approximate=True)
    return x + _linear(up, w[f"{layer}.down"])


@jax.custom_vjp
def _linear(x: Array, weight: Array) -> Array:
    """``x @ weight``, with gradients in the forms that XLA's CPU backend computes fast.

    Its own choice for the gradient of ``weight`` transposes both operands, and fuses the backward
    pass of the activation into one of them. A whole training step then takes 1.5 times as long.
    """
    return x @ weight


def _linear_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ weight, (x, weight)


def _linear_backward(residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    x, weight = residuals
    barrier: Any = lax.optimization_barrier  # untyped in JAX
    d_out = barrier(d_out)
    rows, d_rows = x.reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
    if weight.shape[0] <= weight.shape[1]:
        return d_out @ weight.T, _transposed_product(rows, d_rows)
    return d_out @ weight.T, barrier(_transposed_product(d_rows, rows)).T


def _transposed_product(a: Array, b: Array) -> Array:
    """``a.T @ b``."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


_linear.defvjp(_linear_forward, _linear_backward)


def _norm(x: Array, gain: Array) -> Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + NORM_EPSILON) * gain
