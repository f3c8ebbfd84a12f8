"""T5's learned table from PyTorch to JAX: one definition, so the attention is the same."""

import jax.numpy as jnp
import numpy as np
import torch

import posenc
import posenc_jax
import posenc_torch

t5 = posenc.T5Bias(num_heads=4, causal=True, max_distance=64)
module = posenc_torch.Position(t5)
torch.nn.init.normal_(module.params["table"])  # as if it had been trained
q, k, v = torch.randn(3, 2, 4, 50, 16).unbind()
with torch.no_grad():
    in_torch = module.attend(q, k, v, causal=True)

position = posenc_jax.Position(t5, {"table": jnp.asarray(module.params["table"].detach().numpy())})
swapped = (jnp.asarray(x.transpose(1, 2).numpy()) for x in (q, k, v))  # JAX has (B, L, H, D)
in_jax = np.asarray(position.attend(*swapped, causal=True)).swapaxes(1, 2)
print("largest difference:", f"{np.abs(in_torch.numpy() - in_jax).max():.1e}")
