"""Models of Hugging Face transformers with the positions and attention of posenc.

>>> model = posenc_torch.hf.apply(model)  # its own positions, computed here     # doctest: +SKIP
>>> model = posenc_torch.hf.apply(model, posenc.ALiBi(num_heads))  # others      # doctest: +SKIP

``register()`` is for models that keep their own positions: ``attn_implementation="posenc"`` is then
attention of posenc (``registered.py``).

What ``apply`` does to the model, in place (``model.py``):

1. Its rotary modules return no rotation, and what else its attention computes from positions is
   switched off. ``Family`` says where and how.
2. Its configuration names the attention function of posenc, which transformers then calls with
   queries, keys and values before any position, and with the softmax scale, the cap and the sinks
   that the model has.
3. A hook before each layer reads ``position_ids``. A hook before each attention module reads hidden
   states and the cache. Keys in the cache are not rotated. Their positions, and their hidden states
   if the scheme reads them, are further layers of the same cache (``tokens.py``). So what happens
   to the cache happens to them: beam search, cropping, sliding windows.

Order, causal mask and windows go by the index of a token in its row, and the scheme by
``position_ids``, as in transformers. Padding is never visible.

How a family is added: one entry of ``FAMILIES`` in ``families.py``, by the ``model_type`` of its
configuration (of text, if it is multi-modal). ``Family()`` serves a model

- whose plan ``posenc.presets.from_hf_config`` gives,
- whose layers get ``position_ids``, and have an attention module ``self_attn`` with ``layer_idx``,
- that calls the attention function of its configuration, and
- whose module ``rotary_emb`` makes its angles.

The fields of ``Family`` are what may differ. ``prepare`` may replace any attribute and add hooks:
``applied.replace(module, "forward", function)``. These files show what it takes:

- ``own_attention.py``: attention is code of the model.
- ``embeddings.py``: positions are added to embeddings of tokens.
- ``t5.py``: an encoder and a decoder, each a stack of layers with a plan of its own; layers share
  learned arrays. Attention to tokens of the encoder has no ``Layer``, and no positions.
- ``latent.py``, ``sparse.py``: channels in another order; keys that the model chooses.
- ``axes.py``: several coordinates, which only the rotary module gets.
- ``inkling.py``: learned arrays of the scheme among the model's weights.
"""

from posenc_torch.hf.model import apply, remove
from posenc_torch.hf.registered import register
from posenc_torch.hf.study import ForStudy

__all__ = ["ForStudy", "apply", "register", "remove"]
