"""The rotary modules of the installed transformers, beside ``posenc.hf``."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from float32_frequencies import relative_error

from posenc import hf
from posenc.schemes import RoPE


@cache
def modules():
    """``(module, class)`` of every class of modules whose source speaks of ``inv_freq``."""
    import torch
    import transformers

    found = []
    root = Path(transformers.__file__).parent / "models"
    for file in sorted(root.glob("*/modeling_*.py")):
        # Not inspect.getsource, which takes half a second for each class of a long file.
        parts = re.split(r"^class (\w+)", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        names = [n for n, text in zip(parts[1::2], parts[2::2], strict=True) if "inv_freq" in text]
        module = f"transformers.models.{file.parent.name}.{file.stem}"
        for name in names:
            kind = getattr(importlib.import_module(module), name)
            a_model = issubclass(kind, transformers.PreTrainedModel)  # it has a rotary module
            if issubclass(kind, torch.nn.Module) and not a_model:
                found.append((importlib.import_module(module), kind))
    return found


def configurations(module, kind):
    """Classes of configurations that may fit: the one in the signature, then the family's."""
    from transformers import PreTrainedConfig

    def is_one(value):
        return inspect.isclass(value) and issubclass(value, PreTrainedConfig)

    first = [p.annotation for p in inspect.signature(kind.__init__).parameters.values()]
    name = module.__name__.replace(".modeling_", ".configuration_")
    family = vars(importlib.import_module(name)).values() if find_spec(name) else ()
    own = [c for c in family if is_one(c) and c.__module__ == name]
    return list(dict.fromkeys([c for c in first if is_one(c)] + own)) if is_one(first[1]) else []


def built(module, kind, options):
    """The module and its configuration's JSON; None if no configuration fits."""
    for config_class in configurations(module, kind):
        try:
            config = config_class(**options)
            return kind(config), json.loads(config.to_json_string(use_diff=False))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return None


def compare(name, rotary, config):
    """Raise unless all frequencies of the module are those of its configuration."""
    reading = hf.read(config)
    assert not reading.unknown, (name, reading.unknown)
    held = {k: v for k, v in {**vars(rotary), **dict(rotary.named_buffers())}.items()
            if k.endswith("inv_freq") and "original" not in k and v is not None}  # fmt: skip
    assert held, f"{name} holds no inv_freq"
    for key, inverse in held.items():
        layers = key.removesuffix("inv_freq").rstrip("_")
        ropes = {k: r for k, r in reading.ropes.items() if isinstance(r, RoPE)}
        alone = next(iter(ropes.values())) if len(ropes) == 1 else None
        rope = ropes.get(layers, alone)
        assert rope is not None, (name, key, list(reading.ropes))
        found, expected = np.asarray(rope.frequencies()), inverse.double().numpy()
        assert found.shape == expected.shape, (name, key, found.shape, expected.shape)
        plain = np.maximum(found, rope.base ** (-np.arange(len(found)) / len(found)))
        # As in test_transformers.py: blends are off by at most five errors of the plain one.
        bound = 5 * relative_error(rope.base) * plain
        np.testing.assert_array_less(np.abs(found - expected), bound, err_msg=name)
        scaling = getattr(rotary, key.replace("inv_freq", "attention_scaling"), 1.0)
        assert rope.attention_factor == pytest.approx(scaling, rel=1e-14), name
