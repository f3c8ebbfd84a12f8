"""Packed documents and left padding give the same result as each document on its own."""

import numpy as np

import posenc
from posenc.positions import left_padded, packed


def main():
    rng = np.random.default_rng(0)
    rope = posenc.RoPE(head_dim=8)
    q, k, v = rng.standard_normal((3, 1, 2, 7, 8))

    both = posenc.attention(q, k, v, rope, causal=True, tokens=packed([3, 4]))
    second = posenc.attention(*(x[:, :, 3:] for x in (q, k, v)), rope, causal=True)
    print("second document, packed and alone:", np.allclose(both[:, :, 3:], second))

    padded = posenc.attention(q, k, v, rope, causal=True, tokens=left_padded([4], total=7))
    print("left-padded and alone:", np.allclose(padded[:, :, 3:], second))
    print("rows of padding are 0:", not padded[:, :, :3].any())


if __name__ == "__main__":
    main()
