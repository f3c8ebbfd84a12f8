"""``docs/checkpoints.md``, and that files of safetensors move every scheme's learned arrays."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from subjects import from_catalogue

import posenc

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EVERYTHING = pytest.mark.skipif(
    not all(find_spec(name) for name in ("torch", "jax", "safetensors")),
    reason="needs torch, JAX and safetensors",
)


@EVERYTHING
@pytest.mark.parametrize("code", PYTHON, ids=["frameworks", "families"])
def test_the_page_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "checkpoints.md", "exec"), {})


@EVERYTHING
def test_every_scheme_goes_from_torch_to_jax_and_back():
    import jax
    import safetensors.flax
    import safetensors.torch

    import posenc_jax
    import posenc_torch

    learned = {name: s for name, s in from_catalogue().items() if s.param_specs()}
    assert {"fire", "fox", "learned", "t5"} <= learned.keys()
    for name, scheme in learned.items():
        layer, other = posenc_torch.Position(scheme), posenc_torch.Position(scheme)
        position = posenc_jax.Position(
            scheme, safetensors.flax.load(safetensors.torch.save(layer.state_dict()))
        )
        assert position.params.keys() == posenc.init_params(scheme).keys(), name
        for key, array in position.params.items():
            assert isinstance(array, jax.Array)
            np.testing.assert_array_equal(array, layer.params[key].detach().numpy(), name)
        saved = safetensors.flax.save(dict(position.params))
        other.load_state_dict(safetensors.torch.load(saved))
        for key, array in other.params.items():
            assert array.equal(layer.params[key]), name
