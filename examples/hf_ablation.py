"""Another positional encoding in a model of transformers, which trains with it and generates.

The same random Qwen 3 with its own RoPE, with ALiBi, and with FoX, whose gates are learned.
"""

import copy

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import posenc
from posenc_torch import hf

TEXT = torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 4))


def train(model, steps=60):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # sees what the scheme learns
    for step in range(steps):
        ids = torch.stack([TEXT[n : n + 48] for n in range(step % 45, step % 45 + 8)])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
start = AutoModelForCausalLM.from_config(config)
for scheme in (None, posenc.ALiBi(4), posenc.schemes.FoX(4, 32)):
    model = hf.apply(copy.deepcopy(start), scheme)
    loss = train(model)
    new = model.eval().generate(TEXT[None, :20], max_new_tokens=25, do_sample=False)[0, 20:]
    print(f"{scheme or 'its own'}: loss {loss:.2f}, continues with {bytes(new.tolist())}")
