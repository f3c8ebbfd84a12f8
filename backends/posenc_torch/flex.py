"""Attention through FlexAttention: a scheme's bias is its ``score_mod``, visibility its block mask.

One compiled entry serves the whole library, with recompilations counted apart from the user's own.
Positions, segments and coordinates enter as tensors, so a new length or offset compiles nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import array_api_compat.torch as xp
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from posenc.call import Call, check_pair
from posenc.checks import check_count, check_flag, check_scheme
from posenc.evaluate import is_gated
from posenc.params import Params, merged, named, working_dtype
from posenc.positions import as_integers, as_positions
from posenc.protocol import PositionScheme
from posenc_torch.sight import BLOCK, Places, Sight, padded

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# So many kinds of calls in one process (schemes, masks, dtypes), counted apart from the user's own.
COMPILER: dict[str, Any] = {"fullgraph": True, "recompile_limit": 256, "isolate_recompiles": True}
_NEW_ENOUGH = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_entry: Callable[..., Tensor] | None = None


class HeadRow:
    """The table of one head, chosen inside a kernel: each answer is one load of the whole array."""

    def __init__(self, array: Tensor, head: Tensor) -> None:
        self._array, self._head = array, head
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        # Loads come before the mask, and beyond the end of keys an index may be anything.
        where = index if isinstance(index, tuple) else (index,)
        inside = [
            i if isinstance(i, int) else torch.clamp(i, 0, size - 1)
            for i, size in zip(where, self.shape, strict=True)
        ]
        return self._array[(self._head, *inside)]


class HeadParams(Params):
    """The params of one head: each loaded when first asked for, and once.

    FlexAttention's backward pass takes one load of an array that learns, and none without a use.
    """

    def __init__(
        self, arrays: Mapping[str, Tensor], whole: Sequence[str], head: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(arrays, dtype)
        self._whole, self._head = whole, head
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._view(name)
        return self._loaded[name]

    def _view(self, name: str) -> Any:
        array = self._arrays[name]
        if name in self._whole:
            return array
        return array[self._head] if array.ndim == 1 else HeadRow(array, self._head)


class Bias(NamedTuple):
    """A scheme's bias where FlexAttention asks for it."""

    scheme: PositionScheme
    arrays: Mapping[str, Tensor]
    dtype: torch.dtype
    q: Places
    k: Places
    coords: tuple[Tensor, Tensor] | None

    def score_mod(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The score with the bias of head ``h`` added."""
        params = HeadParams(self.arrays, _shared(self.scheme), h, self.dtype)
        bias = self.scheme.bias(*self._at(b, h, i, j), params=params, xp=xp)
        if bias is None:
            return score
        # A score is traced in q's dtype, whatever a kernel holds: half a float cannot hold a bias.
        wide = torch.promote_types(score.dtype, torch.float32)
        return score.to(wide) + bias.to(wide)

    def _at(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        if self.coords is None:
            return self.q.at(b, i), self.k.at(b, j)
        q, k = self.coords
        return q[b, h, i], k[b, h, j]


def flex(call: Call) -> Tensor:
    """``(B, H, Q, Dv)`` by FlexAttention."""
    q, k, v = call.q, call.k, call.v
    bias = _bias(call)
    run = flex_attention if torch.compiler.is_compiling() else _compiled()
    return run(
        q, k, v,
        score_mod=None if bias is None else bias.score_mod,
        block_mask=_block_mask(call),
        scale=float(call.scale),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def refuses(call: Call) -> str | None:
    """Why FlexAttention cannot serve a call."""
    if not _NEW_ENOUGH:
        return f"it needs PyTorch 2.13 or newer, this is {torch.__version__}"
    if call.dtype == torch.float64:
        return "compiled FlexAttention has no float64"
    if not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"q, k and v differ in dtype: {call.q.dtype}, {call.k.dtype}, {call.v.dtype}"
    if call.q.device.type not in ("cpu", "cuda"):
        return f"it is not tried on {call.q.device.type}"
    on_cpu = call.q.device.type == "cpu"
    if not on_cpu and min(call.q.shape[3], call.v.shape[3]) < 16:
        return f"on a GPU it takes heads of at least 16 channels, not {call.q.shape[3]}"
    tensors = (call.q, call.k, call.v, call.q_coords, call.k_coords, *call.arrays.values())
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if learns and on_cpu:
        return "FlexAttention has no backward pass on a CPU"
    return _several_loads(call) if learns else None


def _several_loads(call: Call) -> str | None:
    """Which learned array the bias loads more than once for a pair: no backward pass has that."""
    found = [n for n in loads(call.scheme, call.arrays) if call.arrays[n].requires_grad]
    if not found:
        return None
    return f"its backward pass takes one load of each learned array, the bias has more of {found}"


def loads(scheme: PositionScheme, arrays: Mapping[str, Tensor]) -> list[str]:
    """The arrays that a scheme's bias loads more than once for one pair, or may."""
    specs, shared = scheme.param_specs(), _shared(scheme)
    tables = {n: _Counted(a) for n, a in arrays.items() if n not in shared and a.ndim > 1}
    if not any(name in specs for name in tables):
        return shared
    like = next(iter(arrays.values()))
    rest = {n: a.new_zeros(a.shape if n in shared else ()) for n, a in arrays.items()}
    at = torch.zeros((), dtype=like.dtype if is_gated(scheme) else torch.int32, device=like.device)
    scheme.bias(at, at, params=Params(rest | tables, like.dtype), xp=xp)
    return shared + [name for name, table in tables.items() if table.loads > 1]


class _Counted:
    """A table of one head that holds zeros, and counts how often it is asked."""

    def __init__(self, array: Tensor) -> None:
        self._zero, self.loads = array.new_zeros(()), 0
        self.shape, self.dtype = tuple(array.shape[1:]), array.dtype

    def __getitem__(self, index: Any) -> Tensor:
        self.loads += 1
        return self._zero


def _shared(scheme: PositionScheme) -> list[str]:
    return [name for name, spec in scheme.param_specs().items() if not spec.per_head]


def avoided(call: Call) -> str:
    """Why ``"auto"`` passes by."""
    if call.q.device.type == "cpu":
        return "on a CPU it compiles for seconds, and SDPA serves at once"
    return "it has not run on a GPU yet, and nobody measured it there"


def score_mod(
    scheme: PositionScheme,
    params: Mapping[str, Any] | None = None,
    *,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_coords: Tensor | None = None,
    k_coords: Tensor | None = None,
    device: torch.device | str | None = None,
) -> ScoreMod:
    """The bias of a scheme, for those who call ``flex_attention`` themselves.

    ``score_mod(score, b, h, i, j)`` is the score with the bias of head ``h`` added. A transform is
    not in it: call ``posenc.transform`` on queries and keys before.

    Parameters
    ----------
    scheme, params
        The positional encoding and its learned arrays by name.
    q_pos, k_pos
        Integer positions, ``(L,)`` or ``(B, L)``, both or neither. Default: the indices themselves,
        as where queries and keys are the same tokens.
    q_coords, k_coords
        For a gated scheme, its coordinates ``(B, H, L)``; see ``posenc.coordinates``.
    device
        Of its constants. Default: that of the tensors given, or torch's own default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    check_scheme(scheme)
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    check_pair("q_coords", q_coords, "k_coords", k_coords)
    if is_gated(scheme) != (q_coords is not None):
        has = "has gates: give" if is_gated(scheme) else "has no gates: leave out"
        raise ValueError(f"{type(scheme).__name__} {has} q_coords and k_coords")
    given = [a for a in (q_pos, q_coords, *named(params).values()) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    dtype = working_dtype(list(named(params).values()), xp=xp)
    arrays = merged(scheme, params, dtype=dtype, device=here, xp=xp)
    places = _INDEXED, _INDEXED
    if q_pos is not None and k_pos is not None:
        places = _given("q_pos", q_pos, here), _given("k_pos", k_pos, here)
    coords = None
    if q_coords is not None and k_coords is not None:
        coords = _apart(q_coords.to(dtype), k_coords.to(dtype))
    return Bias(scheme, arrays, dtype, *places, coords).score_mod


def block_mask(
    q_len: int,
    k_len: int,
    *,
    causal: bool = False,
    window: int | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    q_seg: Tensor | None = None,
    k_seg: Tensor | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Who sees whom, as ``flex_attention`` takes it, from ``O((L / 128)**2)`` work and memory.

    Parameters
    ----------
    q_len, k_len
        Lengths of queries and keys. By default their ends align.
    causal, window, q_pos, k_pos, q_seg, k_seg
        As in ``posenc_torch.attention``.
    device
        Default: that of the tensors given, or torch's own default.

    Raises
    ------
    TypeError, ValueError
        A wrong argument, by name, value and what is accepted.
    """
    check_count("q_len", q_len)
    check_count("k_len", k_len)
    check_pair("q_pos", q_pos, "k_pos", k_pos)
    check_pair("q_seg", q_seg, "k_seg", k_seg)
    given = [a for a in (q_pos, q_seg) if isinstance(a, Tensor)]
    here = device or (given[0].device if given else torch.get_default_device())
    if q_pos is None or k_pos is None:
        if q_len > k_len:
            raise ValueError(f"q_len is {q_len}, k_len only {k_len}: give q_pos and k_pos")
        k_at = torch.arange(k_len, dtype=torch.int32, device=here)
        sides = (
            Places.of(k_at[k_len - q_len :], indexed=q_len == k_len),
            Places.of(k_at, indexed=True),
        )
    else:
        sides = _given("q_pos", q_pos, here), _given("k_pos", k_pos, here)
    q_own, k_own = (
        None if seg is None else Places.of(as_integers(name, seg, device=here, xp=xp))
        for name, seg in (("q_seg", q_seg), ("k_seg", k_seg))
    )
    found = {"q_pos": sides[0], "k_pos": sides[1], "q_seg": q_own, "k_seg": k_own}
    for name, places in found.items():
        length = q_len if name[0] == "q" else k_len
        if places is not None and places.length != length:
            raise ValueError(f"{name} has length {places.length}, {name[0]}_len is {length}")
    # As in attention: no two positions are 2**31 apart.
    window = None if window is None or check_count("window", window) >= 2**31 else window
    return masked(Sight(*sides, q_own, k_own, check_flag("causal", causal), window))


_INDEXED = Places(torch.zeros(0, dtype=torch.int32), 0, indexed=True)


def _given(name: str, pos: Tensor, device: Any) -> Places:
    return Places.of(as_positions(name, pos, device=device, xp=xp))


def uncompiled() -> AbstractContextManager[None]:
    """The same calls through FlexAttention's eager definition, without a compiler: for tests."""
    return _through(flex_attention)


@contextmanager
def _through(entry: Callable[..., Tensor]) -> Iterator[None]:
    global _entry
    before, _entry = _entry, entry
    try:
        yield
    finally:
        _entry = before


def _compiled() -> Callable[..., Tensor]:
    global _entry
    if _entry is None:  # not at import: the compiler takes a second to load
        _entry = torch.compile(flex_attention, **COMPILER)
    return _entry


def _places(call: Call) -> tuple[Places, Places]:
    indexed = call.aligned and call.q.shape[2] == call.k.shape[2]
    return Places.of(call.q_pos, indexed=indexed), Places.of(call.k_pos, indexed=call.aligned)


def _bias(call: Call) -> Bias | None:
    if type(call.scheme).bias is PositionScheme.bias:
        return None
    coords = None
    if call.q_coords is not None and call.k_coords is not None:
        coords = _apart(call.q_coords, call.k_coords)
    return Bias(call.scheme, _computed(call), call.dtype, *_places(call), coords)


def _computed(call: Call) -> Mapping[str, Tensor]:
    """The arrays of a call, constants padded inside a larger compiled graph on a CPU.

    There a kernel captures only what has memory of its own (PyTorch 2.13), which padding gives.
    """
    if call.q.device.type != "cpu" or not torch.compiler.is_compiling():
        return call.arrays
    fixed = call.scheme.constants()
    return {name: padded(a) if name in fixed else a for name, a in call.arrays.items()}


def _apart(q_coords: Tensor, k_coords: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, also where both are one: a backward pass takes one load of each."""
    return padded(q_coords).clone(), padded(k_coords)


def _block_mask(call: Call) -> BlockMask | None:
    q_seg = None if call.q_seg is None else Places.of(call.q_seg)
    k_seg = None if call.k_seg is None else Places.of(call.k_seg)
    sight = Sight(*_places(call), q_seg, k_seg, call.causal, call.window)
    plain = not call.causal and call.window is None and q_seg is None
    if plain and call.q.device.type != "cpu":  # there without one it takes threads * L * L memory
        return None
    return masked(sight)


def masked(sight: Sight) -> BlockMask:
    """The block mask of a sight."""
    some, every = (found[:, None] for found in sight.blocks())  # one for all heads
    lengths = sight.q_pos.length, sight.k_pos.length
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sight.mask_mod,
        seq_lengths=lengths,
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are chosen, and their indices, chosen ones first, in order."""
    indices = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)
