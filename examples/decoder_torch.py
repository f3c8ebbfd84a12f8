"""A small decoder in PyTorch that takes any scheme, or a list of schemes by layer.

``Positions`` adds an embedding once and holds one T5 table for all layers. ``param_groups`` gives
position params the learning rate that they need. ``positions.bind`` makes what positions alone
decide, such as the angles of RoPE or the bias of T5, once for all layers.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import posenc
import posenc_torch

LAYERS, HEADS, DIM, LENGTH, STEPS = 2, 4, 64, 64, 20
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


class Block(nn.Module):
    """Pre-norm attention and MLP; ``forward`` receives the layer's attention."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, attend):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Logits ``(B, L, 256)`` of bytes ``(B, L)``."""

    def __init__(self, scheme):
        super().__init__()
        self.tokens = nn.Embedding(256, DIM)
        self.positions = posenc_torch.Positions(scheme, LAYERS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 256))

    def forward(self, tokens):
        bound = self.positions.bind(causal=True)  # one forward pass
        x = bound.embed(self.tokens(tokens))
        for block, attend in zip(self.blocks, bound, strict=True):
            x = block(x, attend)
        return self.logits(x)


def main():
    t5 = posenc.T5Bias(HEADS, causal=True, max_distance=LENGTH)  # training uses every bucket
    for scheme in (t5, [posenc.RoPE(DIM // HEADS), posenc.NoPE()]):
        torch.manual_seed(0)
        model = Decoder(scheme)
        optimizer = torch.optim.AdamW(posenc_torch.param_groups(model, lr=3e-3))
        for _ in range(STEPS):
            starts = torch.randint(len(TEXT) - LENGTH, (8, 1))
            batch = TEXT[starts + torch.arange(LENGTH + 1)]
            loss = functional.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"loss {loss.item():.2f}, {[*model.positions.state_dict()]} learned: {scheme}")


if __name__ == "__main__":
    main()
