"""Modules and functions with the signatures of other libraries: a model changes one import.

====================================  ====================================================
``TransformersRotary``                ``cos, sin = rotary(x, position_ids)`` of transformers
``TorchtuneRotary``                   ``rotary(x, input_pos=pos)`` of torchtune
``RotaryEmbedding``                   ``rotate_queries_or_keys`` of rotary-embedding-torch
``alibi_mask``                        an additive mask for ``scaled_dot_product_attention``
``posenc_torch.score_mod(ALiBi(H))``  for ``flex_attention``
====================================  ====================================================

Angles are exact at any position: sines and cosines are within 1.5e-7. Those of float32 products,
which these libraries compute, are off by 1e-2 at a million. In half precision a model then rounds
its tables, or these modules their result, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import posenc
from posenc import ALiBi, RoPE
from posenc.backend import check_count
from posenc.schemes import NTK, PI, NoPE

__all__ = ["RotaryEmbedding", "TorchtuneRotary", "TransformersRotary", "alibi_mask"]

_PAIR = 2  # channels that share an angle


class TransformersRotary(nn.Module):
    """The rotary module of transformers, such as ``LlamaRotaryEmbedding``.

    ``model.model.rotary_emb = TransformersRotary(model.config)``. Scalings that depend on the
    length (dynamic NTK, LongRoPE) read the largest position of each call, as there.

    Parameters
    ----------
    source
        A configuration of transformers, or a ``RoPE``.
    device
        Not used: tables are made where ``position_ids`` are.

    Raises
    ------
    TypeError
        ``source`` is neither.
    """

    def __init__(self, source: Any, device: Any = None) -> None:
        super().__init__()
        found: Any = source
        if not isinstance(source, RoPE):
            if not hasattr(source, "to_dict"):
                raise TypeError(
                    "source must be a configuration of transformers or a posenc.RoPE, "
                    f"got {type(source).__name__}"
                )
            found = RoPE.from_hf(source.to_dict())
        self._ropes: Mapping[str, RoPE | NoPE] = (
            found if isinstance(found, Mapping) else {"": found}
        )

    @torch.no_grad()
    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(B, L, R)`` in x's dtype, of ``position_ids (B, L)``.

        ``R`` is the number of channels that turn. In halves the angles stand twice, one after the
        other; interleaved, each stands twice. ``layer_type`` chooses among several rotations.

        Raises
        ------
        ValueError
            ``layer_type`` is none of the configuration's.
        """
        rope = self._rope(layer_type)
        if rope.scaling is not None:
            at_length = rope.at_length(1), rope.at_length(2**30)
            if at_length[0] != at_length[1]:
                rope = rope.at_length(int(position_ids.max()) + 1)
        made = posenc.rotary(rope, position_ids)
        assert made is not None
        sin, cos = (self._twice(made.tables[name][:, 0], rope) for name in ("sin", "cos"))
        return cos.to(x.dtype), sin.to(x.dtype)

    def _rope(self, layer_type: str | None) -> RoPE:
        ropes = {name: rope for name, rope in self._ropes.items() if isinstance(rope, RoPE)}
        rope = ropes.get(layer_type or "", next(iter(ropes.values())) if len(ropes) == 1 else None)
        if rope is None:
            raise ValueError(f"layer_type must be one of {sorted(ropes)}, got {layer_type!r}")
        return rope

    @staticmethod
    def _twice(table: Tensor, rope: RoPE) -> Tensor:
        if rope.layout == "half":
            return torch.cat([table] * _PAIR, dim=-1)
        return table.repeat_interleave(_PAIR, dim=-1)


class TorchtuneRotary(nn.Module):
    """``torchtune.modules.RotaryPositionalEmbeddings``: interleaved pairs of ``(B, L, H, D)``.

    Parameters
    ----------
    dim
        Channels of a head.
    max_seq_len
        Not used: there is no table that ends.
    base
        Base of the frequencies.
    """

    def __init__(self, dim: int, max_seq_len: int = 4096, base: float = 10_000) -> None:
        super().__init__()
        self.dim, self.max_seq_len, self.base = dim, max_seq_len, base
        self._rope = RoPE(dim, base=float(base), layout="interleaved")

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """``x (B, L, H, D)`` rotated at ``input_pos``, ``(B, L)`` or ``(L,)``, default from 0."""
        if input_pos is None:
            input_pos = torch.arange(x.shape[1], device=x.device)
        return _rotate(self._rope, x.transpose(1, 2), input_pos).transpose(1, 2)


class RotaryEmbedding(nn.Module):
    """``rotary_embedding_torch.RotaryEmbedding``: interleaved pairs of ``(..., L, D)``.

    Only what text needs: no pixels, axes, xPos or learned frequencies, for which posenc has
    schemes.

    Parameters
    ----------
    dim
        Channels that turn, the first ones of a head.
    theta
        Base of the frequencies.
    interpolate_factor
        Positions are divided by it (PI).
    theta_rescale_factor
        ``theta`` is multiplied by its power ``dim / (dim - 2)`` (NTK).
    seq_before_head_dim
        Whether inputs are ``(..., L, H, D)``.
    """

    def __init__(
        self,
        dim: int,
        *,
        theta: float = 10_000,
        interpolate_factor: float = 1.0,
        theta_rescale_factor: float = 1.0,
        seq_before_head_dim: bool = False,
    ) -> None:
        super().__init__()
        if interpolate_factor != 1 and theta_rescale_factor != 1:
            raise ValueError(
                f"interpolate_factor={interpolate_factor} and "
                f"theta_rescale_factor={theta_rescale_factor}: one of them must be 1"
            )
        self.dim, self.seq_before_head_dim = dim, seq_before_head_dim
        self._options: dict[str, Any] = {"base": float(theta), "layout": "interleaved"}
        if interpolate_factor != 1:
            self._options["scaling"] = PI(factor=interpolate_factor)
        if theta_rescale_factor != 1:
            self._options["scaling"] = NTK(factor=theta_rescale_factor)

    def rotate_queries_or_keys(
        self, t: Tensor, seq_dim: int | None = None, offset: int = 0
    ) -> Tensor:
        """``t`` rotated at positions ``offset .. offset + L - 1``."""
        axis = (-3 if self.seq_before_head_dim else -2) if seq_dim is None else seq_dim
        rope = RoPE(t.shape[-1], rotary_dim=self.dim, **self._options)
        pos = torch.arange(t.shape[axis], device=t.device) + offset
        return _rotate(rope, t.transpose(axis, -2), pos).transpose(axis, -2)

    def rotate_queries_with_cached_keys(
        self, q: Tensor, k: Tensor, seq_dim: int | None = None, offset: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Queries that are the last of the keys, both rotated."""
        axis = (-3 if self.seq_before_head_dim else -2) if seq_dim is None else seq_dim
        before = k.shape[axis] - q.shape[axis]
        if before < 0:
            raise ValueError(f"q has {q.shape[axis]} tokens, more than the {k.shape[axis]} of k")
        return (
            self.rotate_queries_or_keys(q, seq_dim, before + offset),
            self.rotate_queries_or_keys(k, seq_dim),
        )


def alibi_mask(
    num_heads: int,
    q_len: int,
    k_len: int | None = None,
    *,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """ALiBi as ``attn_mask`` of ``scaled_dot_product_attention``, ``(1, H, Q, K)``.

    ``-m_h * |i - j|``, and ``-inf`` for later keys if ``causal``; the last query is the last key.
    It holds ``H * Q * K`` numbers: ``posenc_torch.attention`` computes the same without them. In
    half precision a large bias is rounded, to a multiple of 2 between 256 and 512 in bfloat16.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype must be one of floating-point numbers, got {dtype}")
    q_len = check_count("q_len", q_len)
    k_len = q_len if k_len is None else check_count("k_len", k_len)
    k_pos = torch.arange(k_len, device=device)
    q_pos = torch.arange(q_len, device=device) + (k_len - q_len)
    bias: Any = posenc.bias(ALiBi(num_heads), q_pos, k_pos)
    if causal:
        bias = bias.masked_fill(k_pos > q_pos[:, None], -torch.inf)
    result: Tensor = bias[None].to(dtype)
    return result


def _rotate(rope: RoPE, x: Tensor, pos: Tensor) -> Tensor:
    result: Tensor = posenc.transform(rope, x, pos, role="query")
    return result
