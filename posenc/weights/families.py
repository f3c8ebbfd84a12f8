"""Params of posenc's schemes from the checkpoints of model families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from array_api_compat import array_namespace

from posenc.contract.checks import check_choice, check_count
from posenc.contract.protocol import Array
from posenc.hf import from_hf_config
from posenc.schemes import ALiBi
from posenc.weights.layouts import interleaved_to_half

Stack = Literal["encoder", "decoder"]


class OpenedFile(Protocol):
    """An opened file of safetensors."""

    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Array: ...


Weights: TypeAlias = Mapping[str, Array] | OpenedFile


def t5(weights: Weights, stack: Stack = "encoder", layer: int = 0) -> dict[str, Array]:
    """``table (H, num_buckets)`` of ``T5Bias(scaled=False)``, from T5, mT5, Flan-T5 or UMT5.

    T5 stores ``(num_buckets, H)``, in the first layer of each stack, which all layers share. The
    decoder's scheme is ``causal=True``.

    Parameters
    ----------
    weights
        The whole model's.
    stack
        ``"encoder"`` or ``"decoder"``.
    layer
        The layer whose table it is. Only UMT5 has one in each.

    Raises
    ------
    TypeError, ValueError
        The array is missing, or has another number of axes; the error names it.
    """
    check_choice("stack", stack, get_args(Stack))
    check_count("layer", layer, least=0)
    name = f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    table = _matrix(weights, name, "(num_buckets, H)")
    xp = array_namespace(table)
    # Through one axis, so that it is contiguous in memory, as files of safetensors need it.
    flat = xp.reshape(xp.permute_dims(table, (1, 0)), (-1,))
    return {"table": xp.reshape(flat, (table.shape[1], table.shape[0]))}


def opt(weights: Weights) -> dict[str, Array]:
    """``table (max_len + 2, dim)`` of ``Learned(max_len, dim, offset=2)``, from OPT.

    Its first two rows belong to no position: position 0 has row 2.

    Raises
    ------
    TypeError, ValueError
        The array is missing, or has another number of axes; the error names it.
    """
    return {"table": _matrix(weights, "decoder.embed_positions.weight", "(max_len + 2, dim)")}


def bloom(config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """``slopes (H,)`` of ``ALiBi(H, learned=True)``, float32, from the configuration of a BLOOM.

    Its checkpoints hold no array of positions. ``posenc.presets.from_hf_config(config)`` has the
    slopes as constants; these are to be trained further. ``split_qkv`` reads its projections.

    Parameters
    ----------
    config
        The configuration, an object of transformers or the dictionary of its ``config.json``.
    """
    return _slopes(config, "bloom")


def mpt(config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """``slopes (H,)`` of ``ALiBi(H, learned=True)``, float32, from the configuration of an MPT.

    As ``bloom``. MPT's slopes differ from BLOOM's where ``H`` is no power of two, or
    ``alibi_bias_max`` is not 8. A configuration without ALiBi is an error.
    """
    return _slopes(config, "mpt")


def gptj(weights: Weights, num_heads: int, rotary_dim: int = 64) -> dict[str, Array]:
    """GPT-J's weights of query and key projections for ``RoPE(head_dim, rotary_dim=rotary_dim)``.

    GPT-J pairs channels ``(2k, 2k + 1)``. Either run it as it is, with ``layout="interleaved"``, or
    replace these weights and use ``layout="half"``, as kernels for rotation may want.

    Parameters
    ----------
    weights
        The whole model's, or one layer's.
    num_heads
        Heads ``H``: ``n_head`` of the configuration.
    rotary_dim
        As in the configuration.

    Returns
    -------
    The converted arrays by their names in the checkpoint, those of all layers in it.

    Raises
    ------
    TypeError, ValueError
        There is no query or key projection, or its rows do not fit; the error names it.
    """
    found = {}
    for suffix in ("q_proj.weight", "k_proj.weight"):
        for name in _names_of(weights, suffix):
            try:
                found[name] = interleaved_to_half(_get(weights)(name), num_heads, rotary_dim)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return found


def _slopes(config: Any, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    whole = config.to_dict() if hasattr(config, "to_dict") else config
    if isinstance(whole, Mapping) and whole.get("model_type") != kind:
        raise ValueError(
            f"config must be that of a {kind!r}, got model_type {whole.get('model_type')!r}"
        )
    scheme = from_hf_config(whole).schemes[0]
    if not isinstance(scheme, ALiBi):
        raise ValueError(f"config must be that of a {kind!r} with ALiBi, got {scheme}")
    return {"slopes": np.asarray(scheme.head_slopes(), np.float32)}


def _matrix(weights: Weights, name: str, shape: str) -> Array:
    """The only array of this name, with any prefix of modules; it has two axes."""
    full, *others = _names_of(weights, name)
    if others:
        raise ValueError(f"weights must have one {name}, got {[full, *others]}: give one model's")
    array = _get(weights)(full)
    if len(array.shape) != 2:
        raise ValueError(f"{full} must have shape {shape}, got {tuple(array.shape)}")
    return array


def _names_of(weights: Weights, suffix: str) -> list[str]:
    """The names that end in these modules; an error if there is none."""
    if not hasattr(weights, "keys"):
        raise TypeError(
            "weights must be a state dict or an opened file of safetensors, got "
            f"{type(weights).__name__}"
        )
    names = [str(name) for name in weights.keys()]  # noqa: SIM118  # a file is no mapping
    found = [name for name in names if name == suffix or name.endswith(f".{suffix}")]
    if not found:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise ValueError(f"weights have no {suffix}; they have {some or 'nothing'}")
    return found


def _get(weights: Weights) -> Callable[[str], Array]:
    return weights.__getitem__ if isinstance(weights, Mapping) else weights.get_tensor
