"""Whether FlexAttention on a GPU would accept a ``score_mod``, without a GPU.

Torch's own lowering to Triton does the checks, before it asks for a device. They are private and
change, so the version is pinned, and only tests use them.
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
HEAD_DIM = 16  # the smallest that a GPU takes


def version_mismatch() -> str | None:
    """Why this version of torch does not serve; None if it does."""
    if torch.__version__.startswith(f"{PINNED}."):
        return None
    return f"the lint reads internals of torch {PINNED}, this is {torch.__version__}"


class LoweringStopped(Exception):  # noqa: N818
    """The lowering has done its checks, and need not go on."""


def forward(score_mod, heads, *, length=64, dtype=torch.float32) -> str | None:
    """Why the forward pass cannot be lowered; None if it can."""
    errors = []

    def check(query, key, value, subgraph, block_mask, scale, options, captured, mask_captured):
        """Replaces the lowering for a CPU, which takes whole tiles; a GPU takes 0-d indices."""
        device = query.get_device()
        inputs = [lowering.create_placeholder("score", query.get_dtype(), device)]
        inputs += [lowering.create_placeholder(n, torch.int32, device) for n in INDICES]
        try:
            lowering.build_subgraph_buffer(inputs + list(captured), subgraph)
        except Exception as error:
            errors.append(_first_line(error))
        else:
            errors.append(None)
        raise LoweringStopped

    torch._dynamo.reset()
    fresh = inductor.patch(force_disable_caches=True)
    with _ignore_warnings(), torch.no_grad(), fresh, _patch(lowering, "lower_cpu", check):
        try:
            torch.compile(public.flex_attention, fullgraph=True)(
                *_qkv(heads, length, dtype), score_mod=score_mod
            )
        except Exception as error:
            return errors[0] if errors else _first_line(error)
        finally:
            torch._dynamo.reset()
    raise AssertionError("the lowering for a CPU was not reached")


def backward(score_mod, heads, *, length=64, dtype=torch.float32) -> str | None:
    """Why the backward pass cannot be lowered; None if it can.

    Gradients are those of q, k, v and of captured tensors that require them.
    """
    errors = []

    def check(graph, _):
        for node in graph.graph.nodes:
            if "flex_attention_backward" in str(node.target):
                errors.append(_joint_graph_error(graph, node))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=check
    )
    torch._dynamo.reset()
    # It allows no gradients on a CPU.
    with _ignore_warnings(), _patch(public, "_validate_device", lambda *_: None):
        try:
            torch.compile(public.flex_attention, backend=backend, fullgraph=True)(
                *(a.requires_grad_() for a in _qkv(heads, length, dtype)), score_mod=score_mod
            ).sum().backward()
        except Exception as error:
            return next(filter(None, errors), _first_line(error))
        finally:
            torch._dynamo.reset()
    assert errors, "there was no joint graph"
    return errors[0]


def _joint_graph_error(graph, node) -> str | None:
    """Torch's error for the joint graph of a backward pass; None if it has none."""
    names = [a.target for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
    joint = getattr(graph, names[1]).graph  # after the one of the forward pass
    joint.eliminate_dead_code()  # as the lowering does
    try:
        lowering.validate_joint_graph(joint)
    except NotImplementedError as error:
        return _first_line(error)
    return None


def _qkv(heads, length, dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, heads, length, HEAD_DIM)
    return torch.randn(shape, generator=generator).to(dtype).unbind()


@contextlib.contextmanager
def _ignore_warnings():
    """Torch warns of disabled caches, and Dynamo of captured tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _patch(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
