"""Your own kernel against the definition: the audit says where it differs, and from where on.

This rotary kernel has positions in the dtype of its vectors, a mistake that many made: bfloat16
has no 257. The same as a command:
``posenc audit own_kernel:rotate --as rope:layout=interleaved``.
"""

import torch

from posenc.testing import check_function


def rotate(x, pos):
    """``x (B, H, L, D)`` turned at ``pos (B, L)``, in pairs of neighbours."""
    half = torch.arange(0, x.shape[-1], 2, dtype=torch.float32)
    angles = pos[:, None, :, None].to(x.dtype) * 10_000 ** (-half / x.shape[-1])
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)


if __name__ == "__main__":
    try:
        check_function(rotate, "rope:layout=interleaved")
    except AssertionError as wrong:
        print(str(wrong)[:600])
