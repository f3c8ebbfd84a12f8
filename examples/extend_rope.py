"""RoPE beyond its training length: as it is, with PI and with YaRN, on the same weights.

Losses at the training length and at sixteen times it. This model is trained for seconds; the same
as a study: ``posenc compare --schemes rope rope~rope_pi rope~rope_yarn``.
"""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posenc.schemes import PI, RoPE, YaRN
from posenc_torch import hf

TEXT = torch.tensor(list(b"one two three four five six seven eight nine ten; " * 20))
TRAIN_LEN, FACTOR = 32, 16

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(80):
    ids = torch.stack([TEXT[n : n + TRAIN_LEN] for n in range(step % 50, step % 50 + 8)])
    loss = model(ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

scalings = {
    "as it is": None,
    "PI": PI(factor=FACTOR),
    "YaRN": YaRN(factor=FACTOR, train_len=TRAIN_LEN),
}
for name, scaling in scalings.items():
    longer = hf.apply(copy.deepcopy(model), RoPE(head_dim=16, scaling=scaling)).eval()
    with torch.no_grad():
        losses = [longer(TEXT[None, :n], labels=TEXT[None, :n]).loss for n in (32, 512)]
    print(f"{name:9}", *(f"{loss:.3f}" for loss in losses))
