"""What two processes compute together; they save it, and tests compare it with one process.

All is float64, so that only the order of a sum can differ.
"""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from subjects import MAX_LEN, SUBJECTS, normal
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel
from torch_layers import Layer, tensors

import posenc
from posenc.positions import packed
from posenc.testing.examples import HEAD_DIM

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "context_parallel.py"))
PROCESSES, BATCH, LENGTH = EXAMPLE["PROCESSES"], 4, 16
# Nothing, constants, an embedding, one array of each shape, several arrays, features, sums, sinks.
KINDS = (
    *("nope", "rope", "alibi", "sinusoidal", "learned", "alibi-learned", "t5", "parabola"),
    *("checkered", "kerple_log", "shaw", "inkling", "fox", "selective", "rope+key-side"),
    *("sink", "sink-of-queries", "rerope"),
)
TRIED = {name: SUBJECTS[name] for name in KINDS}
LEARNING = {name: scheme for name, scheme in TRIED.items() if scheme.param_specs()}
# Sizes that are no multiple of the processes.
UNEVEN = {"three-heads": posenc.T5Bias(3), "odd-table": posenc.Learned(MAX_LEN - 1, HEAD_DIM)}
WRAPPED = ["whole", "by-itself", "from-meta", "ddp"]
SHARES = ["contiguous", "zigzag"]


def layer_and_tokens(subject, device=None):
    """The same in every process."""
    torch.manual_seed(0)
    scheme, wide = (TRIED | UNEVEN)[subject], torch.float64
    layer = Layer(scheme, device=device, dtype=wide)
    return layer, tensors(scheme, LENGTH, LENGTH, BATCH, dtype=wide)


def objective(outputs, part=slice(None), axis=0):
    """A sum over batch and tokens of the outputs, each number with a weight of its own."""
    total = 0.0
    for seed, out in enumerate(outputs):
        shape = list(out.shape)
        where = [slice(None)] * len(shape)
        at = axis if axis == 0 else len(shape) - 2
        shape[at], where[at] = (BATCH, LENGTH)[axis], part
        weights = torch.tensor(normal(shape, 100 + seed))[tuple(where)]
        total = total + (out * weights).sum()
    return total


def wrapped(subject, way):
    """Each process has half of a batch; params are sharded, or gradients averaged."""
    layer, tokens = layer_and_tokens(subject, "meta" if way == "from-meta" else None)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    if way == "ddp":
        run = DistributedDataParallel(layer)
    else:
        if way == "by-itself":
            fully_shard(layer.position, mesh=mesh)
            for method in ("attend", "embed"):
                register_fsdp_forward_method(layer.position, method)
        run = fully_shard(layer, mesh=mesh)
    if way == "from-meta":
        layer.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())  # the first process decides
        layer.position.reset_parameters()
    half = slice(*(BATCH // PROCESSES * (dist.get_rank() + i) for i in range(2)))
    outputs = run(**{name: x[half] for name, x in tokens.items()})
    # Gradients are averaged.
    (PROCESSES * objective(outputs, half)).backward()
    return {
        "outputs": outputs,
        "params": {name: whole(p) for name, p in layer.position.params.items()},
        "gradients": {name: whole(p.grad) for name, p in layer.position.params.items()},
        "shards": {name: local(p) for name, p in layer.position.params.items()},
    }


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def local(x):
    return x.to_local() if hasattr(x, "to_local") else x


def laid_out(subject, split):
    """Params and tokens are DTensors: whole in each process, or split by heads."""
    layer, tokens = layer_and_tokens(subject)
    # DTensor has no rule for the kernel that SDPA takes on a CPU where no mask learns.
    learned_bias = type(layer.position.scheme).bias is not posenc.PositionScheme.bias
    layer.options["implementation"] = "sdpa" if learned_bias else "reference"
    mesh = init_device_mesh("cpu", (PROCESSES,))
    specs = layer.position.scheme.param_specs()
    for name, spec in specs.items():
        at = Shard(0) if split and spec.per_head else Replicate()
        param = distribute_tensor(layer.position.params[name].detach(), mesh, [at])
        layer.position.register_parameter(name, torch.nn.Parameter(param))
    placed = {
        name: distribute_tensor(x, mesh, [Shard(1) if split and name != "x" else Replicate()])
        for name, x in tokens.items()
    }
    with implicit_replication():
        outputs = layer(**placed)
        objective([whole(out) for out in outputs]).backward()
    return {
        "outputs": [whole(out) for out in outputs],
        "local": local(outputs[0]),
        "gradients": {name: whole(p.grad) for name, p in layer.position.params.items()},
    }


def context(subject, share, documents):
    """Each process has half of the tokens, with their positions in the whole sequence."""
    layer, tokens = layer_and_tokens(subject)
    at = EXAMPLE[share](LENGTH, dist.get_rank())
    pos, seg = where(documents)
    mine = {
        name: (x[:, at] if name == "x" else x[:, :, at]).clone().requires_grad_()
        for name, x in tokens.items()
    }
    seg = None if seg is None else seg[at]
    embedded = layer.position.embed(mine["x"], pos[at])
    out = EXAMPLE["attend"](layer.position, **mine, pos=pos[at], seg=seg, causal=True)
    outputs = [out, embedded]
    objective(outputs, at, axis=1).backward()
    gradients = {name: p.grad for name, p in layer.position.params.items()}
    for grad in gradients.values():
        dist.all_reduce(grad)
    own = {name: x.grad for name, x in mine.items()}
    return {"at": at, "outputs": outputs, "gradients": gradients, "own": own}


def where(documents):
    """Positions of the whole sequence, and segments if it is documents one after another."""
    if not documents:
        return torch.arange(LENGTH), None
    tokens = packed([7, LENGTH - 7]).map(torch.tensor)
    return tokens.pos, tokens.seg


KINDS = {"wrapped": wrapped, "laid_out": laid_out, "context": context}


def work(rank, folder, asked):
    """Compute all that is asked for; an error is kept as the result of its own."""
    torch.set_num_threads(1)
    EXAMPLE["join"](rank, folder)
    found = {}
    for kind, *at in asked:
        try:
            found[kind, *at] = KINDS[kind](*at)
        except Exception:
            found[kind, *at] = traceback.format_exc()
    torch.save(found, Path(folder) / f"found-{rank}")
    dist.destroy_process_group()
