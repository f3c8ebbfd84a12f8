"""Context parallelism: two processes, each with half of the tokens, compute the result of one.

A process holds queries, keys and values of its own tokens, and their positions in the whole
sequence. It gathers the keys, values and positions of all processes, then calls attention once.
Positions may come in any order, so any share of the tokens works. The zig-zag share gives every
process the same work under a causal mask.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import posenc
import posenc_torch

PROCESSES, LENGTH = 2, 16


def contiguous(length, rank):
    """Positions of the tokens of a process: one part of the sequence."""
    return torch.arange(length).chunk(PROCESSES)[rank]


def zigzag(length, rank):
    """Positions of the tokens of a process: an early and an equally late part of the sequence."""
    parts = torch.arange(length).chunk(2 * PROCESSES)
    return torch.cat([parts[rank], parts[-1 - rank]])


class Gather(torch.autograd.Function):
    """Concatenate the equal shares of all processes; sum a share's gradient over processes."""

    @staticmethod
    def forward(ctx, share, dim):
        ctx.dim = dim
        shares = [torch.empty_like(share) for _ in range(PROCESSES)]
        dist.all_gather(shares, share)
        return torch.cat(shares, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(PROCESSES, ctx.dim)[dist.get_rank()], None


def gather(share, dim):
    return Gather.apply(share.contiguous(), dim)


def attend(position, q, k, v, pos, seg=None, x=None, **keywords):
    """Attention of this process's queries to the keys of all processes.

    ``pos`` and ``seg (L,)`` are positions and documents of this process's tokens. ``x (B, L, C)``
    are their hidden states, for a scheme that reads them.
    """
    queries = posenc.Tokens(pos, seg, x=x)
    tokens = posenc.Tokens(
        gather(pos, 0),
        None if seg is None else gather(seg, 0),
        x=None if x is None else gather(x, 1),
    )
    return position.attend(
        q, gather(k, 2), gather(v, 2), tokens=tokens, queries=queries, **keywords
    )


def join(rank, folder):
    """Join the other processes."""
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", rendezvous, timeout, rank=rank, world_size=PROCESSES)


def work(rank, folder):
    join(rank, folder)
    torch.manual_seed(0)  # the same params and tokens in every process, as if loaded
    position = posenc_torch.Position(posenc.T5Bias(num_heads=4, causal=True))
    q, k, v = torch.randn(3, 1, 4, LENGTH, 8)
    whole = position.attend(q, k, v, causal=True)
    (expected,) = torch.autograd.grad(whole.square().sum(), position.table)

    pos = zigzag(LENGTH, rank)
    out = attend(position, *(x[:, :, pos] for x in (q, k, v)), pos, causal=True)
    (gradient,) = torch.autograd.grad(out.square().sum(), position.table)
    dist.all_reduce(gradient)

    values = torch.allclose(out, whole[:, :, pos], atol=1e-6)
    gradients = torch.allclose(gradient, expected, atol=1e-5)
    line = f"tokens {pos.tolist()}: values {values}, gradients {gradients}"
    (Path(folder) / f"result-{rank}").write_text(line)
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
        print("equal to one process:")
        for rank in range(PROCESSES):
            print((Path(folder) / f"result-{rank}").read_text())


if __name__ == "__main__":
    main()
