"""MLX and mlx-lm as far as the reader of configurations asks them, on NumPy arrays."""

from __future__ import annotations

import importlib
import sys
import types

import numpy as np

import posenc.audit


class Array:
    """``mx.array``, which makes arrays of NumPy here."""

    def __new__(cls, values):
        return np.asarray(values)


class Turn(dict):
    """A rotary module without arrays; dynamic NTK from the length ``grows`` on."""

    def __init__(self, dims, *, base=10_000.0, pairs="half", back=False, factor=1.0, grows=0):
        super().__init__()
        self.dims, self.base, self.pairs, self.back = dims, base, pairs, back
        self.factor, self.grows = factor, grows

    def __call__(self, x, offset=0):
        n, out = self.dims // 2, np.array(x)
        base = self.base
        if self.grows and (longer := max(x.shape[-2] + offset, self.grows)) > self.grows:
            base *= (2.0 * longer / self.grows - 1) ** (self.dims / (self.dims - 2))
        if not n:
            return out
        first = np.arange(n) if self.pairs == "half" else 2 * np.arange(n)
        second = first + (n if self.pairs == "half" else 1)
        angles = (offset + np.arange(x.shape[-2]))[:, None] * base ** (-np.arange(n) / n)
        cos, sin = np.cos(angles), np.sin(angles) * (-1 if self.back else 1)
        out[..., first] = self.factor * (x[..., first] * cos - x[..., second] * sin)
        out[..., second] = self.factor * (x[..., second] * cos + x[..., first] * sin)
        return out


class Attention(dict):
    """A module of MLX is a dictionary of its arrays and modules."""

    def __init__(self, rope, *, refuses=False, calls=True):
        super().__init__({} if rope is None else {"rope": rope})
        self.rope, self.scale, self.refuses, self.calls = rope, 0.25, refuses, calls

    def __call__(self, x, mask=None, cache=None):
        if self.refuses:
            raise RuntimeError("a cache is needed")
        if "rope" in self and self.calls:
            self.rope(np.zeros((1, 4, 2, 16)))

    def named_modules(self):
        return [("self_attn", self)]


def reader(monkeypatch, build, classes=lambda config: None):
    """The reader of mlx-lm, for which ``build(config)`` gives the attention of each layer."""

    def model(arguments):
        return types.SimpleNamespace(layers=build(arguments))

    model.__module__ = "mlx_lm.models.llama"
    same = types.SimpleNamespace(from_dict=lambda given: given)
    core = types.ModuleType("mlx.core")
    core.array, core.eye, core.zeros = Array, np.eye, np.zeros
    modules = {
        "mlx": types.ModuleType("mlx"), "mlx.core": core, "mlx_lm": types.ModuleType("mlx_lm"),
        "mlx_lm.utils": types.ModuleType("mlx_lm.utils"),
    }  # fmt: skip
    modules["mlx"].core = core
    modules["mlx_lm.utils"]._get_classes = lambda config: classes(config) or (model, same)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "posenc.audit.config_mlx_lm", raising=False)
    found = importlib.import_module("posenc.audit.config_mlx_lm")
    # Nobody else finds what was imported with stand-ins, nor by the package's attribute.
    del sys.modules["posenc.audit.config_mlx_lm"], posenc.audit.config_mlx_lm
    monkeypatch.setattr(found, "version", lambda name: "0.1")
    return found.MlxLm()
