"""``docs/checkpoints.md``, and that files of safetensors move every scheme's learned arrays."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from sample import long
from subjects import from_catalogue

import posenc
from posenc.testing import assert_near
from posenc.testing.tolerances import ATTENTION_TOL

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EVERYTHING = pytest.mark.skipif(
    not all(find_spec(name) for name in ("torch", "jax", "safetensors")),
    reason="needs torch, JAX and safetensors",
)


@EVERYTHING
@pytest.mark.parametrize("code", PYTHON, ids=["frameworks", "dlpack", "families"])
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


@long
@EVERYTHING
def test_memory_goes_from_torch_to_jax_and_back():
    """Learned arrays, and cached keys in the layout of each; a part of a cache is refused."""
    import jax.numpy as jnp
    import torch

    import posenc_jax
    import posenc_torch

    for scheme in (posenc.make("fire", num_heads=4, train_len=16), posenc.T5Bias(4)):
        layer = posenc_torch.Position(scheme)
        q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
        params = {name: jnp.from_dlpack(p.detach()) for name, p in layer.params.items()}
        for name, p in layer.params.items():
            assert torch.from_dlpack(params[name]).data_ptr() == p.data_ptr()
        swapped = [jnp.from_dlpack(x.transpose(1, 2)) for x in (q, k, v)]
        for own, x in zip((q, k, v), swapped, strict=True):
            assert torch.from_dlpack(x).data_ptr() == own.data_ptr()
            np.testing.assert_array_equal(torch.from_dlpack(x).transpose(1, 2), own)
        out = posenc_jax.Position(scheme, params).attend(*swapped, causal=True)
        right = layer.attend(q, k, v, causal=True).detach()
        assert_near(torch.from_dlpack(out).transpose(1, 2), right, ATTENTION_TOL["float32"])
    with pytest.raises(Exception, match="compact"):
        jnp.from_dlpack(k[:, :, :4])
