"""``SchemeCase``: a scheme with the sizes, params and positions that laws check it with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import array_api_compat.numpy as xp
import numpy as np

import posenc
from posenc.apply.bias import bias_tile
from posenc.apply.feature_needs import has_features, reads_hidden
from posenc.apply.shapes import as_column, as_row
from posenc.apply.transform import has_transform
from posenc.attn.hidden_width import hidden_width
from posenc.contract.checks import check_count, check_scheme
from posenc.contract.params import (
    Features,
    Params,
    check_params,
    head_count,
    key_head_count,
    merge_constants,
)
from posenc.contract.protocol import PositionScheme, Role
from posenc.contract.tokens import Tokens
from posenc.positions.integers import MAX_POSITION, MIN_POSITION
from posenc.testing.attention_case import AttentionCase
from posenc.testing.framework import Host, readonly
from posenc.testing.tokens import RoleTokens
from posenc.testing.variants import field_variants, sizes_of

_HEADS, _HEAD_DIM, _HIDDEN_DIM = 4, 8, 16
_MOST_KEPT = 2**13  # numbers of an array: 64 MiB for all
_MIN_POSITIONS = 20  # laws use up to so many
_BATCH = 2
_WIDE_HEAD_DIM = 136  # above 128, and no power of two
_ROLES: tuple[Role, Role] = ("query", "key")


@dataclass(frozen=True, eq=False)
class SchemeCase:
    """A scheme and what laws need to check it.

    Parameters
    ----------
    scheme
        The scheme.
    head_dim
        Channels per head. Default: the field ``head_dim`` of the scheme, or of a part of it, or 8.
    hidden_dim
        Channels of the hidden states that its features read. Default: the sizes of its params are
        tried; the largest that features accept is taken.
    params
        Learned arrays. Default: ``posenc.init_params``. Give others where initial values hide
        mistakes, as zeros do.
    variants
        Schemes of the same class that differ in one field. Default: made by changing one field at a
        time, if it is a number, a flag, an enum or a ``Literal``. Give them for other fields.
    positions
        Lowest and highest position that the scheme accepts. Default: ``0 .. max_len - 1`` of a
        scheme with a field ``max_len``, else the whole range of positions.
    """

    scheme: PositionScheme
    head_dim: int = 0
    hidden_dim: int = 0
    params: Mapping[str, Host] = field(default_factory=dict)
    variants: tuple[PositionScheme, ...] = ()
    positions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        if not isinstance(self.scheme, PositionScheme):
            raise TypeError(f"scheme must inherit from posenc.PositionScheme: {self.scheme!r}")
        for name in ("head_dim", "hidden_dim"):
            check_count(name, getattr(self, name), least=0)
        own = dict(self.params) or posenc.init_params(self.scheme)
        check_params(self.scheme, own, xp=xp)
        settings = {
            "params": {name: readonly(value) for name, value in own.items()},
            "head_dim": self.head_dim or min(sizes_of(self.scheme, "head_dim"), default=_HEAD_DIM),
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)
        width = self.hidden_dim or hidden_width(self.scheme, own) or _HIDDEN_DIM
        object.__setattr__(self, "hidden_dim", width)
        object.__setattr__(self, "positions", self._checked_positions())

    @property
    def heads(self) -> int:
        """Number of heads: that of the scheme if it has one, else 4."""
        return head_count(self.scheme) or key_head_count(self.scheme) or _HEADS

    @property
    def reads_hidden(self) -> bool:
        """Whether the scheme computes features from hidden states."""
        return reads_hidden(self.scheme)

    @cached_property
    def shares_keys(self) -> bool:
        """Whether heads may share keys (GQA): not if the transform has per-head params."""
        x = np.zeros((1, 1, 1, self.head_dim), np.float32)
        try:
            turned = self.transform(x, self.tokens(np.zeros(1, int), "key"))
            return bool(turned.shape[:-1] == x.shape[:-1])
        except ValueError:
            return False

    def _checked_positions(self) -> tuple[int, int]:
        """The given or default range; raises if the scheme fails at its ends."""
        low, high = self.positions
        if (low, high) == (0, 0):
            longest = min(sizes_of(self.scheme, "max_len"), default=None)
            low, high = (MIN_POSITION, MAX_POSITION) if longest is None else (0, longest - 1)
        if not (MIN_POSITION <= low <= 0 and _MIN_POSITIONS - 1 <= high <= MAX_POSITION):
            raise ValueError(
                f"positions are {low} .. {high} for {self.scheme}, accepted: a lowest in "
                f"-2**30 .. 0, a highest in {_MIN_POSITIONS - 1} .. 2**30 - 1; "
                f"laws need max_len >= {_MIN_POSITIONS}"
            )
        try:
            self._evaluate_at(np.asarray([low, high]))
        except IndexError as error:
            raise ValueError(
                f"{self.scheme} fails at positions {low} and {high}: {error}. If the scheme "
                "takes fewer, give it a field max_len, or SchemeCase positions=(lowest, highest)"
            ) from error
        except Exception:
            return low, high  # a law reports any other error
        return low, high

    def _evaluate_at(self, pos: Host) -> None:
        """Evaluate everything that depends on integer positions."""
        posenc.embedding(self.scheme, pos, self.params)
        x = np.zeros((1, self.heads, pos.size, self.head_dim), np.float32)
        self.transform(x, self.tokens(pos, "key"))
        self.bias(pos, pos)

    def draw_positions(self, rng: np.random.Generator, length: int | tuple[int, ...] = 0) -> Host:
        """Unsorted positions, with repeats: near 0, far away, and of all sizes between."""
        low, high = self.positions
        length = length or int(rng.integers(1, 7))
        near = min(high, 8)
        spread = rng.integers(low, high, length, endpoint=True)
        close = rng.integers(max(low, -near), near, length, endpoint=True)
        # Log-uniform: as many from 100 to 200 as from 100,000 to 200,000.
        sized = np.exp2(rng.uniform(0, np.log2(high), length)).astype(np.int64)
        sized = np.where(rng.random(length) < 0.5, sized, np.maximum(low, -sized))
        return np.choose(rng.integers(3, size=length), [spread, close, sized])

    def tokens(self, pos: Host, role: Role, seed: int = 0) -> RoleTokens:
        """Tokens at positions; ``seed`` draws hidden states and vectors for their features.

        A scheme of several axes gets different coordinates per axis: rotations of the positions.
        """
        pos = readonly(pos)
        if self.scheme.axes == 1:
            places = None
        else:
            places = np.stack([np.roll(pos, n, axis=-1) for n in range(self.scheme.axes)], axis=-1)
        if not has_features(self.scheme):
            return RoleTokens(role, Tokens(pos, places=places, features={}))
        batch, length = len(pos) if pos.ndim == 2 else 1, pos.shape[-1]
        vectors = (batch, self.heads, length, self.head_dim)
        features = posenc.features(
            self.scheme,
            {name: a.astype(np.float64) for name, a in self.params.items()},
            Tokens(pos, places=places, x=self.normal((batch, length, self.hidden_dim), seed + 21)),
            q=self.normal(vectors, seed + 22),
            k=self.normal(vectors, seed + 23),
        )[_ROLES.index(role)].features
        own = {name: readonly(a.astype(np.float32)) for name, a in features.items()}
        return RoleTokens(role, Tokens(pos, places=places, features=own))

    def draw_tokens(
        self, rng: np.random.Generator, role: Role, length: int | tuple[int, ...] = 0
    ) -> RoleTokens:
        """Tokens at drawn positions."""
        return self.tokens(self.draw_positions(rng, length), role)

    def transform(
        self,
        x: Host,
        tokens: RoleTokens,
        params: Mapping[str, Host] | None = None,
        rotary: posenc.Rotary | None = None,
    ) -> Host:
        """Queries or keys ``x (B, H, L, D)``, transformed at the positions of ``tokens``."""
        given = self.params if params is None else params
        features = tokens.features if has_transform(self.scheme) else {}
        return np.asarray(
            posenc.transform(
                self.scheme, x, tokens.pos, role=tokens.role, params=given, places=tokens.places,
                features={n: a.astype(_working_float(x)) for n, a in features.items()},
                rotary=rotary,
            )
        )  # fmt: skip

    def whole_params(self, dtype: str = "float32") -> Params:
        """Learned arrays and constants, with all heads."""
        real = np.dtype(dtype)
        arrays = merge_constants(self.scheme, self.params, dtype=real, device="cpu", xp=xp)
        return Params({name: readonly(a) for name, a in arrays.items()}, real)

    def head_params(
        self,
        head: int,
        dtype: str = "float32",
        query: Features | None = None,
        key: Features | None = None,
    ) -> Params:
        """Params of one head: per-head scalars 0-d, its row of a table; features as given."""
        specs = self.scheme.param_specs()
        arrays = self.whole_params(dtype)
        own = {
            name: a if name in specs and not specs[name].per_head else readonly(a[head])
            for name, a in arrays.items()
        }
        return Params(own, arrays.dtype, query or Features({}, "query"), key or Features({}, "key"))

    def bias(
        self, q: RoleTokens | Host, k: RoleTokens | Host, dtype: str = "float32"
    ) -> Host | None:
        """Bias of every head ``(H, Q, K)``, or ``(B, H, Q, K)`` for positions ``(B, L)``.

        Given positions become tokens by ``tokens``. None if the scheme has no bias.
        """
        q = q if isinstance(q, RoleTokens) else self.tokens(q, "query")
        k = k if isinstance(k, RoleTokens) else self.tokens(k, "key")
        arrays, at = self.whole_params(dtype), (as_column(readonly(q.pos)), as_row(readonly(k.pos)))
        query, key = q.bias_reads(arrays.dtype), k.bias_reads(arrays.dtype)
        tile = bias_tile(self.scheme, *at, arrays, query=query, key=key, dtype=arrays.dtype, xp=xp)
        if tile is None:
            return None
        batch = max(len(t.pos) if t.pos.ndim == 2 else 1 for t in (q, k))
        shape = (batch, self.heads, q.size, k.size)
        whole: Host = np.broadcast_to(tile, shape)
        return whole if 2 in (q.pos.ndim, k.pos.ndim) else whole[0]

    @cached_property
    def has_bias(self) -> bool:
        """Whether the scheme has a bias: its method ``bias`` may return None."""
        one = np.zeros(1, np.int64)
        return self.bias(one, one) is not None

    def normal(self, shape: tuple[int, ...], seed: int) -> Host:
        """Independent normal values, read-only, that half precision represents exactly."""
        # Laws ask for the same small ones again and again.
        return (_kept if math.prod(shape) <= _MOST_KEPT else _normal)(shape, seed)

    def tensors(
        self, q_len: int, k_len: int | None = None, *, batch: int = _BATCH, grouped: bool = False
    ) -> dict[str, Host]:
        """Float64 q, k, v, and hidden states x of the keys' tokens.

        ``grouped``: k and v have fewer heads, if the scheme allows it.
        """
        k_len, count = k_len or q_len, self.heads
        grouped = grouped and count > 1 and self.shares_keys
        shared = next(n for n in (2, 3, count) if count % n == 0) if grouped else 1
        kv = (batch, count // shared, k_len, self.head_dim)
        shapes = {"q": (batch, count, q_len, self.head_dim), "k": kv, "v": kv}
        vectors = {name: self.normal(shape, n) for n, (name, shape) in enumerate(shapes.items())}
        return vectors | {"x": self.normal((batch, k_len, self.hidden_dim), 3)}

    def call(self, tensors: Mapping[str, Host], **options: Any) -> AttentionCase:
        """A call of attention with this scheme and these params; ``x`` is that of the tokens."""
        given = dict(tensors)
        x = given.pop("x", None)
        if x is not None and self.reads_hidden:
            options["tokens"] = replace(options.get("tokens") or Tokens(), x=x)
        return AttentionCase(self.scheme, given, self.params, options)

    def with_wider_heads(self) -> Iterator[SchemeCase]:
        """The case with more channels per head, if the scheme, or its class, takes more."""
        try:
            if "head_dim" not in _field_names(self.scheme):
                if sizes_of(self.scheme, "head_dim"):
                    return
                wide = replace(self, head_dim=_WIDE_HEAD_DIM)
                for role in _ROLES:
                    wide.transform(
                        wide.normal((1, wide.heads, 1, _WIDE_HEAD_DIM), 0),
                        wide.tokens(np.zeros(1, int), role),
                    )
            else:
                own: Any = self.scheme
                wide = SchemeCase(
                    replace(own, head_dim=_WIDE_HEAD_DIM),
                    hidden_dim=self.hidden_dim,
                    positions=self.positions,
                )
        except (TypeError, ValueError, IndexError):
            return  # its number of channels is fixed
        yield wide

    def named_variants(self) -> Iterator[Iterator[tuple[str, PositionScheme]]]:
        """Groups of variants, each with a name; one of a group must compute something else.

        A given variant is a group of its own. Otherwise a group changes one field.
        """
        if self.variants:
            yield from (iter([(repr(other), other)]) for other in self.variants)
            return
        yield from field_variants(self.scheme)

    def variants_of_uncompared_fields(self) -> Iterator[tuple[str, PositionScheme]]:
        """Schemes with one field changed that ``==`` does not compare."""
        for group in field_variants(self.scheme, compared=False):
            yield from islice(group, 1)


def _normal(shape: tuple[int, ...], seed: int) -> Host:
    values = np.random.default_rng(seed).standard_normal(shape)
    return readonly(np.round(values * 32) / 32)


_kept = lru_cache(maxsize=1024)(_normal)


def _field_names(scheme: Any) -> set[str]:
    """Names of the fields of a scheme that its class takes."""
    return {each.name for each in fields(scheme) if each.init} if is_dataclass(scheme) else set()


def _working_float(x: Host) -> Any:
    """The working dtype for vectors ``x``."""
    return np.float64 if x.dtype == np.float64 else np.float32
