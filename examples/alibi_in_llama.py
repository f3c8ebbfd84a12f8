"""ALiBi in place of RoPE in a Llama of transformers, with the same weights; and back."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posenc
from posenc_torch import hf

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(0, 256, (1, 40))
with torch.no_grad():
    own = model(tokens).logits
    hf.apply(model, posenc.ALiBi(num_heads=4))
    alibi = model(tokens).logits
    hf.remove(model)
    again = model(tokens).logits
print("ALiBi changes the logits by up to", f"{(alibi - own).abs().max():.3f}")
print("and removing it restores them:", torch.equal(own, again))
