"""``attn_implementation="posenc"``: the model keeps its positions, and posenc computes attention.

transformers calls an attention function with queries and keys that the model has rotated, and with
its mask, which is that of ``sdpa``. So every model that calls the function of its configuration is
served, without an entry in ``families.py``. Positions of posenc need ``apply``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc.backend import PositionScheme, check_choice
from posenc.schemes import NoPE, Sink
from posenc_torch.api import IMPLEMENTATIONS, attention
from posenc_torch.hf.families import FAMILIES
from posenc_torch.hf.layer import dropout_name
from posenc_torch.hf.learned import RECORD
from posenc_torch.hf.own_attention import OWN_ATTENTION

NAME = "posenc"  # what a caller gives as attn_implementation


def register(implementation: str = "auto") -> None:
    """Make ``attn_implementation="posenc"`` known to transformers.

    ``AutoModelForCausalLM.from_pretrained(folder, attn_implementation="posenc")`` then gives a
    model with its own positions, whose attention posenc computes: with the model's softmax scale,
    cap of scores, sinks, windows and masks, of text, images or sound. ``apply`` may follow.

    Parameters
    ----------
    implementation
        That of ``posenc_torch.attention``, for all models; the last call decides.

    Raises
    ------
    ImportError
        transformers is not installed.
    ValueError
        In a call: attention is code of the model, so no function is called; or the model was saved
        under ``apply`` with another scheme, which only ``apply`` can compute.
    NotImplementedError
        In a call: ``output_attentions``, dropout of attention weights, keys that a model chooses
        (DeepSeek V3.2), or a paged cache.
    """
    check_choice("implementation", implementation, ("auto", *IMPLEMENTATIONS))
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "posenc_torch.hf needs transformers: pip install 'transformers>=5'"
        ) from error
    AttentionInterface.register(NAME, partial(attention_of_model, implementation))
    AttentionMaskInterface.register(NAME, mask_of_model)


def attention_of_model(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, as ``sdpa_attention_forward`` of transformers.

    Without a mask, causal attention is that of a sequence from its beginning: keys after the
    queries' number are slots of a static cache that hold no token yet.
    """
    of_config = f"set {dropout_name(module)} of the configuration to 0, or call model.eval()"
    refused = {
        f"dropout={dropout}; {of_config}": dropout,
        "output_attentions=True: posenc returns no weights": others.get("output_attentions"),
        "indices: keys that the model chooses": others.get("indices") is not None,
        "a paged cache": others.get("cache") is not None,
    }
    for what, asked in refused.items():
        if asked:
            raise NotImplementedError(f"attn_implementation={NAME!r} does not serve {what}")
    if getattr(getattr(module, "config", None), RECORD, None) is not None:
        raise ValueError(
            f"model was saved under posenc_torch.hf.apply(model, scheme), and attn_implementation="
            f"{NAME!r} computes its own positions instead: give apply(model, scheme) that scheme"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if causal:
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    options: dict[str, Any] = {}
    if position_bias is not None:
        options["bias"] = position_bias[..., : key.shape[2]]
    if attention_mask is not None:
        whole = attention_mask.expand(-1, -1, query.shape[2], -1)
        if whole.dtype == torch.bool:
            options["mask"] = whole
        else:
            options["bias"] = whole + options.get("bias", 0.0)
    scheme: PositionScheme = NoPE() if s_aux is None else Sink(NoPE(), query.shape[1])
    params = None if s_aux is None else {"sink": s_aux}
    out = attention(
        query, key, value, scheme, params, causal, scale=scaling, softcap=softcap,
        implementation=implementation, **options,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def mask_of_model(*arguments: Any, config: Any = None, **keywords: Any) -> Tensor | None:
    """The mask of transformers' ``sdpa``, for models that call the function of a configuration."""
    from transformers.masking_utils import sdpa_mask

    kind = getattr(config, "model_type", None)
    if kind in FAMILIES and FAMILIES[kind].own_attention:
        raise ValueError(
            f"attn_implementation={NAME!r}: attention of model_type {kind!r} is code of its own, "
            "which calls no function of a configuration; load it with attn_implementation='eager' "
            f"and give it to posenc_torch.hf.apply, as {', '.join(sorted(OWN_ATTENTION))}"
        )
    mask: Tensor | None = sdpa_mask(*arguments, config=config, **keywords)
    return mask
