"""Context parallel: two processes, each with half of the tokens, give the numbers of one.

A process holds queries, keys and values of its own tokens, and their positions in the whole
sequence. It gathers keys, values and their positions; the rest is one call of attention, because
positions may come in any order. So any share of the tokens will do. The zig-zag one gives every
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
    """The tokens of a process: one part of the sequence."""
    return torch.arange(length).chunk(PROCESSES)[rank]


def zigzag(length, rank):
    """The tokens of a process: an early part of the sequence, and as late a one."""
    parts = torch.arange(length).chunk(2 * PROCESSES)
    return torch.cat([parts[rank], parts[-1 - rank]])


class Gather(torch.autograd.Function):
    """Equal shares of all processes in one tensor; a share's gradient is the sum over processes."""

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
    """Attention of the queries here to the keys of all processes.

    ``pos`` and ``seg (L,)`` are the positions and documents of the tokens here, ``x (B, L, C)``
    their hidden states for a scheme that reads them.
    """
    where = {"q_pos": pos, "k_pos": gather(pos, 0)}
    if seg is not None:
        where |= {"q_seg": seg, "k_seg": gather(seg, 0)}
    if x is not None:
        where |= {"x": gather(x, 1), "q_x": x}
    return position.attend(q, gather(k, 2), gather(v, 2), **where, **keywords)


def meet(rank, folder):
    """Join the other processes."""
    meeting = (Path(folder) / "meeting").as_uri()
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", meeting, wait, rank=rank, world_size=PROCESSES)


def work(rank, folder):
    meet(rank, folder)
    torch.manual_seed(0)  # the same params and tokens everywhere, as if loaded
    position = posenc_torch.Position(posenc.T5Bias(num_heads=4))
    q, k, v = torch.randn(3, 1, 4, LENGTH, 8)
    whole = position.attend(q, k, v, causal=True)
    (expected,) = torch.autograd.grad(whole.square().sum(), position.table)

    pos = zigzag(LENGTH, rank)
    part = attend(position, *(x[:, :, pos] for x in (q, k, v)), pos, causal=True)
    (gradient,) = torch.autograd.grad(part.square().sum(), position.table)
    dist.all_reduce(gradient)

    values = torch.allclose(part, whole[:, :, pos], atol=1e-6)
    gradients = torch.allclose(gradient, expected, atol=1e-5)
    line = f"tokens {pos.tolist()}: values {values}, gradients {gradients}"
    (Path(folder) / f"lines-{rank}").write_text(line)
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
        print("equal to one process, by process:")
        for rank in range(PROCESSES):
            print((Path(folder) / f"lines-{rank}").read_text())


if __name__ == "__main__":
    main()
