"""Your own positional encoding in one file: KERPLE's logarithmic form.

``bias = -p * log(1 + a * |i - j|)``, with ``a`` and ``p`` positive and learned per head (Chi et al.
2022, arXiv 2205.09921). The code needs no framework, batch, cache or mask.
"""

from dataclasses import dataclass

import numpy as np

import posenc


@dataclass(frozen=True)
class KerpleLog(posenc.PositionScheme, relative=True, paper="Chi et al. 2022, arXiv 2205.09921"):
    """``-p log(1 + a |i - j|)``. Params are logarithms, so p and a stay positive."""

    num_heads: int

    def param_specs(self):
        return {name: posenc.ParamSpec((self.num_heads,)) for name in ("log_p", "log_a")}

    def bias(self, q, k, *, params, xp):
        p, a = xp.exp(params["log_p"]), xp.exp(params["log_a"])
        return -p * xp.log1p(a * xp.astype(xp.abs(q - k), a.dtype))


def main():
    scheme = KerpleLog(num_heads=4)
    params = posenc.init_params(scheme)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 4, 6, 8))
    whole = posenc.attention(q, k, v, scheme, params, causal=True)
    last = posenc.attention(q[:, :, -1:], k, v, scheme, params, causal=True)
    print("bias of head 1 at the last query:", posenc.bias(scheme, *last_and_all(6), params)[0])
    print("decoding gives the last row:", np.allclose(whole[:, :, -1:], last))


def last_and_all(length):
    """Positions of the last query and of all keys."""
    return np.arange(length)[-1:], np.arange(length)


if __name__ == "__main__":
    main()
