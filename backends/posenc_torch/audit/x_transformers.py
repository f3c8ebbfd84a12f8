"""x-transformers: rotations, biases, and what depends on content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from x_transformers import x_transformers
from x_transformers.attend import Attend
from x_transformers.x_transformers import (
    AlibiPositionalBias,
    RelativePositionBias,
    RotaryEmbedding,
    apply_rotary_pos_emb,
)

from posenc.audit import Candidate, CannotExpressError, Sizes
from posenc.audit.adapters import causal_alibi, params_of, row_of, square_of
from posenc_torch.audit import runs

_NAME = "x-transformers"
_candidate = partial(runs.candidate, _NAME)
_PLAIN = "apply_rotary_pos_emb(x, *RotaryEmbedding(D)(pos))"
_INNER = "layout=interleaved"
_NPOS = 16
_OTHERS = {
    "DynamicPositionBias(dim, heads=H, depth=2)": "its bias is a network of the distance",
    "PerRowDataDependentAlibi(dim, H)": "its gates are of a query and a key",
    "RelativeProjPositionalBias(...)": "its bias is of a projected query and a key's distance",
}
_ROPE: dict[str, dict[str, Any]] = {
    f"rope:{_INNER}": {},
    f"rope:{_INNER},base=500000": {"base": 500_000},
    f"rope:{_INNER},rotary_dim=32": {"dim": 32},
    f"rope_pi:{_INNER},factor=4": {"interpolation_factor": 4.0},
    f"rope_ntk:{_INNER},factor=4": {"base_rescale_factor": 4.0},
}


def candidates(grid: str) -> Iterator[Candidate]:
    """Every candidate; compiled ones in the full grid alone."""
    for label, options in _ROPE.items():
        said = ", ".join(f"{name}={value}" for name, value in options.items() if name != "dim")
        subject = f"apply_rotary_pos_emb(x, *RotaryEmbedding(D{', ' if said else ''}{said})(pos))"
        yield _candidate(
            subject, label, "rotation", partial(_rotary, options), dtypes=runs.HALF,
        )  # fmt: skip
    if grid == "full":
        quick = runs.compiled(partial(_rotary, {}))
        yield _candidate(_PLAIN, f"rope:{_INNER}", "rotation", quick, path="compiled")
    yield _candidate(_PLAIN, "rope", "rotation", _half)
    alibi = "AlibiPositionalBias(H).forward_custom_pos(q_pos, k_pos)"
    yield _candidate(alibi, "alibi", "bias", _alibi, differentiable=False)
    yield _candidate(
        "AlibiPositionalBias(H)(Q, K)", "alibi", "bias", _alibi_of_lengths, differentiable=False,
    )  # fmt: skip
    for causal in (False, True):
        label = f"t5:num_buckets=32,max_distance=128,causal={causal}"
        yield _candidate(
            f"RelativePositionBias(1, causal={causal})(Q, K)", label, "bias", partial(_t5, causal),
        )  # fmt: skip
    yield _candidate(
        "DataDependentAlibi(C, H)(x), gates of ALiBi's slopes", "alibi", "bias", _gates,
        causal_alibi, differentiable=False,
    )  # fmt: skip
    yield _candidate(
        "RotaryEmbedding(D, use_xpos=True), Attend()(q, k, v)", f"xpos:{_INNER}", "attention",
        _xpos,
    )  # fmt: skip
    yield _candidate(
        f"Attend(cope=CoPE(D, H, {_NPOS}))(q, k, v)", f"cope:npos={_NPOS}", "attention", _cope,
    )  # fmt: skip
    yield _candidate(
        "PolarEmbedding(D, H), apply_polar_pos_emb, Attend()(q, k, v)", "pope", "attention", _pope,
        params=_phases,
    )  # fmt: skip
    yield _candidate(
        "ScaledSinusoidalEmbedding(C)(x, pos), its scale 1", "sinusoidal:layout=concatenated",
        "embedding", _sinusoidal, differentiable=False,
    )  # fmt: skip
    yield _candidate(
        "AbsolutePositionalEmbedding(C, L)(x, pos), its scale 1", "learned:max_len=512",
        "embedding", _learned,
    )  # fmt: skip
    for subject, what in _OTHERS.items():
        yield runs.lacking(_NAME, subject, f"posenc has no such scheme: {what}")


def _rotary(options: dict[str, Any], sizes: Sizes) -> Callable[..., Tensor]:
    rotary = RotaryEmbedding(**{"dim": sizes.head_dim, **options})

    def f(x: Tensor, pos: Tensor) -> Tensor:
        found: Tensor = apply_rotary_pos_emb(x, *rotary(pos))
        return found

    return f


def _half(sizes: Sizes) -> Callable[..., Tensor]:
    raise CannotExpressError("it pairs adjacent channels, and has no option for halves")


def _alibi(sizes: Sizes) -> Callable[..., Tensor]:
    bias = AlibiPositionalBias(sizes.num_heads)

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        found: Tensor = bias.forward_custom_pos(q_pos, k_pos)
        return found

    return f


def _alibi_of_lengths(sizes: Sizes) -> Callable[..., Tensor]:
    bias = AlibiPositionalBias(sizes.num_heads)

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        found: Tensor = bias(*square_of(q_pos, k_pos))
        return found

    return f


def _t5(causal: bool, sizes: Sizes) -> Callable[..., Tensor]:
    bias = RelativePositionBias(1.0, causal, 32, 128, sizes.num_heads)
    del bias._modules["relative_attention_bias"]  # its weight is no leaf of the audit's gradient

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor, table: Tensor) -> Tensor:
        bias.register_parameter("unused", torch.nn.Parameter(torch.zeros(())))  # tells the device
        read = partial(torch.nn.functional.embedding, weight=table.T)
        bias.__dict__["relative_attention_bias"] = read
        found: Tensor = bias(*square_of(q_pos, k_pos))
        return found

    return f


def _gates(sizes: Sizes) -> Callable[..., Tensor]:
    """Without weights a gate is the same for every token, and the bias is linear in distance."""
    slopes = torch.tensor(causal_alibi(sizes).head_slopes(), dtype=torch.float64)  # type: ignore[attr-defined]
    layer = x_transformers.DataDependentAlibi(1, sizes.num_heads)
    linear = layer.to_forget_gates[0]
    with torch.no_grad():
        linear.weight.zero_()
        linear.bias.copy_(-torch.log(torch.expm1(slopes)))  # log(sigmoid(b)) is minus the slope

    def f(num_heads: int, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        queries, keys = square_of(q_pos, k_pos)
        with torch.no_grad():
            found: Tensor = layer(torch.zeros(1, keys, 1))[0, :, keys - queries :]
        return found

    return f


def _xpos(sizes: Sizes) -> Callable[..., Tensor]:
    rotary, attend = RotaryEmbedding(sizes.head_dim, use_xpos=True), Attend()

    def f(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        freqs, scale = rotary(k_pos)  # queries are the last of the keys
        turned = apply_rotary_pos_emb(q, freqs, scale), apply_rotary_pos_emb(k, freqs, scale**-1.0)
        found: Tensor = attend(*turned, v, mask=mask)[0]
        return found

    return f


def _cope(sizes: Sizes) -> Callable[..., Tensor]:
    cope = x_transformers.CoPE(sizes.head_dim, sizes.num_heads, _NPOS)
    del cope._parameters["pos_emb"]
    attend = Attend(cope=cope)

    def f(
        q: Tensor, k: Tensor, v: Tensor, e: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> Tensor:
        if bool((k_pos.diff(dim=1) <= 0).any()):
            raise CannotExpressError("it counts gates in the order of tokens, not of positions")
        cope.__dict__["pos_emb"] = e
        found: Tensor = attend(q, k, v, mask=mask)[0]
        return found

    return f


def _phases(sizes: Sizes) -> dict[str, Any]:
    """None at a bound of its range, where a gradient is a convention."""
    return {"delta": params_of("pope", sizes)["delta"] - 1 / 64}


def _pope(sizes: Sizes) -> Callable[..., Tensor]:
    polar = x_transformers.PolarEmbedding(sizes.head_dim, sizes.num_heads)
    del polar._parameters["learned_bias"]
    attend, turn = Attend(scale=sizes.head_dim**-0.5), x_transformers.apply_polar_pos_emb

    def f(
        q: Tensor, k: Tensor, v: Tensor, delta: Tensor, mask: Tensor, q_pos: Tensor, k_pos: Tensor
    ) -> Tensor:
        runs.check_heads(q, k)
        polar.__dict__["learned_bias"] = delta[:, None]
        freqs, bias = polar(torch.as_tensor(row_of(k_pos, in_order=False)))
        found: Tensor = attend(turn(q, freqs), turn(k, freqs + bias), v, mask=mask)[0]
        return found

    return f


def _sinusoidal(sizes: Sizes) -> Callable[..., Tensor]:
    layer = x_transformers.ScaledSinusoidalEmbedding(sizes.num_heads * sizes.head_dim)
    layer.scale.data.fill_(1)

    def f(pos: Tensor) -> Tensor:
        row = torch.as_tensor(row_of(pos, in_order=False))
        with torch.no_grad():
            found: Tensor = layer(row[None], pos=row)
        return found

    return f


def _learned(sizes: Sizes) -> Callable[..., Tensor]:
    layer = x_transformers.AbsolutePositionalEmbedding(1, sizes.max_len)
    layer.scale = 1.0
    del layer.emb._parameters["weight"]  # it is no leaf of the audit's gradient

    def f(pos: Tensor, table: Tensor) -> Tensor:
        layer.emb.__dict__["weight"] = table
        found: Tensor = layer(pos, pos=pos)
        return found

    return f
