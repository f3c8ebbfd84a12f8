"""Long causal attention in PyTorch on a CPU: implementations against SDPA without positions."""

from __future__ import annotations

import numpy as np

from suite import DIM, GRID, HEADS, NAMES, Timed, lengths, make, warm
from suite.backends import implementations

_LENGTHS = lengths(2048, 4096)
# The reference takes seconds per call, and gigabytes: only in the full grid.
_IMPLEMENTATIONS = [
    name for name in implementations("posenc_torch") if GRID == "full" or name != "reference"
]
_BIASED = [name for name in ("alibi", "t5") if name in NAMES]


def _leaves(length, *more):
    """q, k, v and params that require gradients."""
    import torch

    torch.set_num_threads(1)
    values = np.random.default_rng(0).standard_normal((3, 1, HEADS, length, DIM), np.float32)
    return [torch.tensor(a, requires_grad=True) for a in (*values, *more)]


def _attention(name, implementation, length):
    """A call of attention, and its leaves: q, k, v and params."""
    if implementation == "missing":
        raise NotImplementedError("torch is not installed")
    import posenc_torch

    scheme, params = make(name, length)
    leaves = _leaves(length, *(a.astype(np.float32) for a in params.values()))
    own = dict(zip(params, leaves[3:], strict=True))
    return lambda q, k, v: posenc_torch.attention(
        q, k, v, scheme, own, causal=True, implementation=implementation
    ), leaves


def _sdpa(length):
    try:
        from torch.nn.functional import scaled_dot_product_attention
    except ImportError:
        raise NotImplementedError("torch is not installed") from None
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), _leaves(length)


class _Forward(Timed):
    """Memory is that of the whole process, imports included: subtract ``Imported``."""

    timeout = 600
    warmup_time = 0  # ``setup`` already made a call, which takes a second

    def _begin(self, attend, leaves):
        import torch

        # Detached: on a CPU FlexAttention refuses tensors that require gradients.
        tokens = [a.detach() for a in leaves[:3]]

        def forward():
            with torch.no_grad():
                attend(*tokens)

        self.run = forward

    def time_forward(self, *_):
        self.run()

    def peakmem_forward(self, *_):
        self.run()


class _Train(Timed):
    timeout = 600
    warmup_time = 0  # ``setup`` already made a call, which takes a second

    def _begin(self, attend, leaves):
        import torch

        def step():
            torch.autograd.grad(attend(*leaves[:3]).sum(), leaves)

        self.run = step

    def time_train_step(self, *_):
        self.run()

    def peakmem_train_step(self, *_):
        self.run()


class Forward(_Forward):
    """Causal attention, ``B=1 H=8 D=64``, float32, without gradients."""

    param_names = ("scheme", "implementation", "length")
    params = (_BIASED, _IMPLEMENTATIONS, _LENGTHS)

    @warm
    def setup(self, name, implementation, length):
        self._begin(*_attention(name, implementation, length))


class Train(_Train):
    """The same with gradients of q, k, v and params."""

    param_names = ("scheme", "implementation", "length")
    params = (_BIASED, _IMPLEMENTATIONS, _LENGTHS)

    @warm
    def setup(self, name, implementation, length):
        self._begin(*_attention(name, implementation, length))


class ForwardSDPA(_Forward):
    """``scaled_dot_product_attention(is_causal=True)``, the baseline of the above."""

    param_names = ("length",)
    params = (_LENGTHS,)

    @warm
    def setup(self, length):
        self._begin(*_sdpa(length))


class TrainSDPA(_Train):
    """The same with gradients."""

    param_names = ("length",)
    params = (_LENGTHS,)

    @warm
    def setup(self, length):
        self._begin(*_sdpa(length))


class Imported:
    """Memory of PyTorch, posenc and the tensors, which the other benchmarks include."""

    param_names = ("length",)
    params = (_LENGTHS,)

    def setup(self, length):
        try:
            import posenc_torch  # noqa: F401
        except ImportError:
            raise NotImplementedError("torch is not installed") from None
        self.leaves = _leaves(length)

    def peakmem_nothing(self, length):
        pass
