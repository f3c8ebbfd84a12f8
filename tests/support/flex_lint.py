"""Whether FlexAttention on a GPU would accept a ``score_mod``, found without one.

The checks are those of torch's own lowering to Triton, which comes to them before it asks for a
device. They are private and move: pinned to one version, and only the tests stand on them.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
import torch._inductor.config as inductor
import torch.nn.attention.flex_attention as public
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.kernel.flex import flex_attention as lowering

PINNED = "2.13"
INDICES = "bhmn"
DIM = 16  # the fewest channels that a GPU takes


def unpinned() -> str | None:
    """Why nothing can be said with this version of torch."""
    if torch.__version__.startswith(f"{PINNED}."):
        return None
    return f"the lint reads internals of torch {PINNED}, this is {torch.__version__}"


class Enough(Exception):  # noqa: N818
    """The lowering has come as far as it is of interest."""


def forward(score_mod, heads, *, length=64, dtype=torch.float32) -> str | None:
    """Why the forward pass cannot be lowered; None if it can."""
    verdicts = []

    def probe(query, key, value, subgraph, block_mask, scale, options, captured, mask_captured):
        """In place of the lowering for a CPU, which takes whole tiles; a GPU takes 0-d indices."""
        device = query.get_device()
        inputs = [lowering.create_placeholder("score", query.get_dtype(), device)]
        inputs += [lowering.create_placeholder(n, torch.int32, device) for n in INDICES]
        try:
            lowering.build_subgraph_buffer(inputs + list(captured), subgraph)
        except Exception as error:
            verdicts.append(_line(error))
        else:
            verdicts.append(None)
        raise Enough

    torch._dynamo.reset()
    fresh = inductor.patch(force_disable_caches=True)
    with _quietly(), torch.no_grad(), fresh, _instead(lowering, "lower_cpu", probe):
        try:
            torch.compile(public.flex_attention, fullgraph=True)(
                *_qkv(heads, length, dtype), score_mod=score_mod
            )
        except Exception as error:
            return verdicts[0] if verdicts else _line(error)
        finally:
            torch._dynamo.reset()
    raise AssertionError("the lowering for a CPU was not reached")


def backward(score_mod, heads, *, length=64, dtype=torch.float32) -> str | None:
    """Why the backward pass cannot be lowered, with gradients of q, k, v and all that is captured
    and asks for them; None if it can.
    """
    verdicts = []

    def judge(graph, _):
        for node in graph.graph.nodes:
            if "flex_attention_backward" in str(node.target):
                verdicts.append(_refused(graph, node))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=judge
    )
    torch._dynamo.reset()
    # It wants no gradients on a CPU.
    with _quietly(), _instead(public, "_validate_device", lambda *_: None):
        try:
            torch.compile(public.flex_attention, backend=backend, fullgraph=True)(
                *(a.requires_grad_() for a in _qkv(heads, length, dtype)), score_mod=score_mod
            ).sum().backward()
        except Exception as error:
            return next(filter(None, verdicts), _line(error))
        finally:
            torch._dynamo.reset()
    assert verdicts, "no joint graph was seen"
    return verdicts[0]


def _refused(graph, node) -> str | None:
    """What torch says of the joint graph of a backward pass."""
    names = [a.target for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
    joint = getattr(graph, names[1]).graph  # after the one of the forward pass
    joint.eliminate_dead_code()  # as the lowering does
    try:
        lowering.validate_joint_graph(joint)
    except NotImplementedError as error:
        return _line(error)
    return None


def _qkv(heads, length, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, heads, length, DIM)
    return torch.randn(shape, generator=generator).to(dtype).unbind()


@contextlib.contextmanager
def _quietly():
    """Torch warns of caches that are off, and of what Dynamo does with captured tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _instead(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
