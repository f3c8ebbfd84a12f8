"""Long causal attention in PyTorch on a CPU: every path beside SDPA without positions."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other time the load

import numpy as np

import posenc
from suite import NAMES
from suite.backends import _paths

_HEADS, _DIM, _LENGTH = 8, 64, 4096
_BIASED = [name for name in ("alibi", "t5") if name in NAMES]


def _leaves(*more):
    """q, k, v and params that ask for gradients."""
    import torch

    torch.set_num_threads(1)
    values = np.random.default_rng(0).standard_normal((3, 1, _HEADS, _LENGTH, _DIM), np.float32)
    return [torch.tensor(a, requires_grad=True) for a in (*values, *more)]


def _attention(name, path):
    """A call of attention, and all that it learns."""
    if path == "missing":
        raise NotImplementedError("torch is not installed")
    import posenc_torch

    scheme = posenc.make(name, num_heads=_HEADS, head_dim=_DIM, max_len=_LENGTH)
    params = posenc.init_params(scheme)
    leaves = _leaves(*(a.astype(np.float32) for a in params.values()))
    own = dict(zip(params, leaves[3:], strict=True))
    return lambda q, k, v: posenc_torch.attention(
        q, k, v, scheme, own, causal=True, path=path
    ), leaves


def _sdpa():
    try:
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError:
        raise NotImplementedError("torch is not installed") from None
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), _leaves()


class _Forward:
    """Memory is the process's own, with all that it imported: see ``Imported``."""

    timeout = 600

    def _begin(self, attend, leaves):
        import torch

        # Not leaves: FlexAttention takes none that ask for gradients on a CPU.
        tokens = [a.detach() for a in leaves[:3]]

        def forward():
            with torch.no_grad():
                attend(*tokens)

        self.run = forward
        forward()  # it may compile

    def time_forward(self, *_):
        self.run()

    def peakmem_forward(self, *_):
        self.run()


class _Train:
    timeout = 600

    def _begin(self, attend, leaves):
        import torch

        def step():
            torch.autograd.grad(attend(*leaves[:3]).sum(), leaves)

        self.run = step
        step()

    def time_train_step(self, *_):
        self.run()

    def peakmem_train_step(self, *_):
        self.run()


class Forward(_Forward):
    """Causal attention, ``B=1 H=8 L=4096 D=64``, float32, without gradients."""

    param_names = ("scheme", "path")
    params = (_BIASED, _paths("posenc_torch"))

    def setup(self, name, path):
        self._begin(*_attention(name, path))


class Train(_Train):
    """The same with gradients of q, k, v and params."""

    param_names = ("scheme", "path")
    params = (_BIASED, _paths("posenc_torch"))

    def setup(self, name, path):
        self._begin(*_attention(name, path))


class ForwardSDPA(_Forward):
    """``scaled_dot_product_attention(is_causal=True)``: what the above would like to equal."""

    def setup(self):
        self._begin(*_sdpa())


class TrainSDPA(_Train):
    """The same with gradients."""

    def setup(self):
        self._begin(*_sdpa())


class Imported:
    """What the memory of the others begins with: PyTorch, posenc, and the tensors."""

    def setup(self):
        try:
            import posenc_torch  # noqa: F401
        except ImportError:
            raise NotImplementedError("torch is not installed") from None
        self.leaves = _leaves()

    def peakmem_nothing(self):
        pass
