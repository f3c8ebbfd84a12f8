"""Attention of arrays that are spread over a mesh, whose axes are explicit unless one asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import long

from posenc.testing.tolerances import attention_bound

if not require("jax"):
    pytest.skip("JAX is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
from over_meshes import PARTS

import posenc

# Two programs, forward and backward, of two layers.
TOLERANCE = 2 * 2 * 2 * attention_bound("float32", keys=20)


@pytest.mark.skipif(not hasattr(jax.sharding, "auto_axes"), reason="needs jax.sharding.auto_axes")
@long
@pytest.mark.parametrize("part", ["quick", "rest"])
def test_a_call_on_a_mesh_is_the_call(part):
    """Values and gradients, compiled and eager. The process with four devices starts once."""
    script = Path(__file__).parents[1] / "support" / "over_meshes.py"
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, str(script), part],
        capture_output=True, text=True, timeout=1800, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == sum(len(kinds) for *_, kinds in PARTS[part])
    wrong = {
        at: error for at, error in errors.items() if isinstance(error, str) or error > TOLERANCE
    }
    assert not wrong, "\n".join(f"{at}: {error}" for at, error in wrong.items())


@pytest.mark.parametrize("committed", [False, True])
def test_what_is_made_of_arrays_stays_on_a_device_only_if_they_do(committed):
    """JAX refuses arrays that stay on one device beside others that are spread over several."""
    here = jax.devices()[0] if committed else None
    pos, x = (jax.device_put(a, here) for a in (jnp.arange(5), jnp.ones((1, 5, 12))))
    fox = posenc.make("fox", num_heads=2, hidden_dim=12)
    params = {name: jnp.asarray(a) for name, a in posenc.init_params(fox).items()}
    made = [
        posenc.bias(posenc.ALiBi(2), pos, pos),
        posenc.embedding(posenc.Sinusoidal(8), pos),
        posenc.rotary(posenc.RoPE(8), posenc.Tokens(pos)),
        posenc.features(fox, params, posenc.Tokens(pos, x=x))[1].features["c"],
    ]
    arrays = jax.tree.leaves(made)
    assert len(arrays) >= len(made)
    assert {array.committed for array in arrays} == {committed}
