"""Training and scores of a study in JAX: float32, many training steps in one compiled call."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from posenc import Tokens
from posenc.backend import LayerPlan
from posenc.study import ADAM_EPSILON, BETAS, NO_ANSWER, Decoder, Layers, check_model
from posenc_jax.decoder import decoder_logits
from posenc_jax.position import Positions
from posenc_jax.study import OwnModel, own_logits

_TOKENS, _ON_CPU = 2048, 1024  # in one evaluation batch; scores of more leave a CPU's caches
_PREFIXES = ("", "optimizer.first.", "optimizer.second.")  # of params and moments in a state


class Trainer:
    """Trains and scores one model; see ``posenc.study.Trainer``."""

    trains_models = True
    computes = ("dtype", "accumulate", "compile")  # it always compiles

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        if scratch is not None:
            _share_compilations(scratch)
        name = None if device == "auto" else device
        self._device = jax.devices(name)[0]
        self._decoder = decoder
        own = decoder.recipe.model
        weights = jax.tree.map(jnp.copy, OwnModel(decoder).weights) if own else decoder.weights
        params = {"weights": weights, "position": list(decoder.position)}
        self._params = jax.device_put(params, self._device)
        zeros = jax.tree.map(jnp.zeros_like, self._params)
        self._moments = [zeros, jax.tree.map(jnp.copy, zeros)]
        self._steps = 0
        self.gradient_norms: Any = np.zeros(0, np.float32)
        if decoder.recipe.model:
            check_model(decoder, self._trace, self.logits)

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
        tokens = _ON_CPU if self._device.platform == "cpu" else _TOKENS
        size, static = max(1, tokens // length), _Static(self._decoder)
        filled = [np.pad(a, ((0, -rows % size), (0, 0))).astype(np.int32) for a in arrays]
        parts = zip(*(np.split(a, len(a) // size) for a in filled), strict=True)
        return [program(static, layers, self._params, *part) for part in parts]

    def _trace(self, tokens: Any, watch: Any) -> Any:
        """The shape of the logits of a model that is called with ``watch(bound)``."""
        layers = self._decoder.layers(length=tokens.shape[1])
        run = partial(_logits, self._decoder, layers, watch=watch)
        return jax.eval_shape(run, self._params, tokens.astype(np.int32)).shape

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

    @staticmethod
    def device_memory() -> int:
        """The most bytes of the first device so far; 0 where it does not tell, as a CPU."""
        return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))

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

    def mean_loss(
        params: Any, tokens: Array, labels: Array, pos: Array | None, count: Array
    ) -> Array:
        losses, _ = _losses(decoder, layers, params, tokens, labels, pos)
        return losses.sum() / count

    def gradient_of(params: Any, tokens: Array, labels: Array, pos: Array | None) -> Any:
        """The mean loss of a batch and its gradient, computed in parts."""
        count, parts = (labels != NO_ANSWER).sum(), recipe.accumulate
        if parts == 1:
            return jax.value_and_grad(mean_loss)(params, tokens, labels, pos, count)

        def add(total: Any, part: Any) -> Any:
            found = jax.value_and_grad(mean_loss)(params, *part, pos, count)
            return jax.tree.map(jnp.add, total, found), None

        split = [a.reshape(parts, -1, *a.shape[1:]) for a in (tokens, labels)]
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        return lax.scan(add, zero, tuple(split))[0]

    def step(state: Any, inputs: Any) -> Any:
        params, first, second = state
        tokens, labels, pos, step_rate, count = inputs
        loss, gradient = gradient_of(params, tokens, labels, pos)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, recipe.clip / norm), gradient)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradient)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, gradient)

        def update(path: Any, p: Array, m: Array, v: Array) -> Any:
            positional = path[0].key == "position"
            decays = not positional and p.ndim >= 2
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
    decoder: Decoder, layers: Layers, params: Any, tokens: Array, pos: Array | None = None,
    watch: Any = lambda bound: bound,
) -> Array:  # fmt: skip
    """``(N, T, V)``, of the model called with ``watch(bound)``."""
    bound = watch(_positions(layers, params).bind(Tokens(pos), causal=True))
    logits_of = own_logits if decoder.recipe.model else decoder_logits
    return logits_of(decoder.recipe, params["weights"], tokens, bound)


def _own_params(layers: Layers, layer: int, params: Any) -> dict[str, Array]:
    """The learned arrays of the layer that its scheme needs."""
    own = params["position"][layers.owners[layer]]
    return {name: own[name] for name in layers.schemes[layer].param_specs()}


def _positions(layers: Layers, params: Any) -> Positions:
    """The schemes, windows and learned arrays of the layers, as a model has them."""
    plan = LayerPlan(tuple(layers.schemes), tuple(layers.windows))
    own = {str(layer): _own_params(layers, layer, params) for layer in plan.first_layers}
    return Positions(plan, own)
