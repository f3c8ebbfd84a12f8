"""Whether a scheme fits the heads of a model, asked before the first call."""

from __future__ import annotations

from typing import Any

import torch

from posenc.backend import LayerPlan, Tokens, attention_part
from posenc_torch.api import attention


def check_fit(plan: LayerPlan, learned: Any, modules: list[Any], config: Any) -> None:
    """Attend to one token of zeros with each scheme of a plan.

    Raises
    ------
    ValueError
        The scheme has other heads or channels than the model, or cannot turn keys that query heads
        share.
    """
    for layer, (scheme, module) in enumerate(zip(plan.schemes, modules, strict=True)):
        sizes = _head_sizes(module, config)
        if sizes is None or scheme in plan.schemes[:layer]:
            continue
        heads, kv_heads, dim = sizes
        tokens = Tokens(x=torch.zeros(1, 1, config.hidden_size))
        q, k = torch.zeros(1, heads, 1, dim), torch.zeros(1, kv_heads, 1, dim)
        part, params = attention_part(scheme, learned[layer].params)
        try:
            with torch.no_grad():
                attention(q, k, k, part, params, True, tokens=tokens)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"scheme {scheme} does not fit layer {layer} of the model, which has {heads} heads "
                f"of {dim} channels, and {kv_heads} of keys: {error}"
            ) from error


def _head_sizes(module: Any, config: Any) -> tuple[int, int, int] | None:
    """Heads of queries and of keys, and channels, of an attention module; None if unknown."""
    dim = getattr(module, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(dim, int) or not isinstance(heads, int):
        return None
    projections = (getattr(module, name, None) for name in ("q_proj", "k_proj"))
    wide = [int(getattr(each, "out_features", 0)) for each in projections]
    if not all(wide) or any(width % dim for width in wide):
        return heads, heads, dim  # a fused projection: whether keys are shared is not known
    return (heads, wide[1] // dim, dim) if wide[0] == heads * dim else None
