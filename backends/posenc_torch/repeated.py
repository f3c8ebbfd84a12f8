"""Single calls that repeat one another: from the third on, nothing but vectors is new.

A model calls attention in each layer and step with the same scheme, mask and shapes. What these
alone decide is then made once, as in a pass of layers: checks, positions, the choice of an
implementation, angles, a bias with its mask. The second equal call makes it, so a call that never
comes again leaves nothing behind.

Only on a CPU, and without learned arrays, tokens, a mask or a bias of the caller's, whose values
may change. On a GPU, what is kept could be memory of a graph that records the call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from posenc.backend import Arguments, PositionScheme, Shared, may_warn
from posenc_torch.sharing import is_alone, new_shared, of_vectors

LIMIT = 2**23
"""How many numbers are kept in all: 32 MB in float32. One call may keep half of them."""
_CALLS = 64


Run: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class OfVectors(NamedTuple):
    """Attention as a function of vectors, if there is one, and how many numbers it holds.

    None if later calls may add to them.
    """

    run: Run | None = None
    numbers: int | None = 0


_SEEN, _NEVER = OfVectors(), OfVectors()  # once; and no function serves
_kept: dict[Hashable, OfVectors] = {}
_writing = Lock()


def kind_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scheme: PositionScheme,
    params: Mapping[str, Any] | None,
    causal: bool,
    given: Arguments,
    implementation: str,
    skip_blocks: bool,
) -> Hashable | None:
    """What equal calls have in common; None for a call that is not kept."""
    if is_alone():  # first: a compiler does not trace the rest
        return None
    # By identity and type: 1 equals True and 1.0, and is not accepted in their place.
    window, scale, k_transformed = given.window, given.scale, given.k_transformed
    plain = (
        (params is None or (type(params) is dict and not params))
        and (causal is True or causal is False)
        and (skip_blocks is True or skip_blocks is False)
        and (window is None or type(window) is int)
        and (scale is None or type(scale) is float)
        and (k_transformed is True or k_transformed is False)
        and given.return_lse is False
        and given.mask is given.tokens is given.queries is given.bias is given.softcap is None
        and isinstance(scheme, PositionScheme)
        and not torch._C._len_torch_dispatch_stack()  # a mode may count operations, or keep results
    )
    if not plain or (vectors := of_vectors(q, k, v)) is None:
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    kind = vectors, scheme, causal, window, scale, k_transformed, implementation, skip_blocks
    try:
        hash(kind)
    except TypeError:  # a scheme that holds arrays
        return None
    return kind


def find(kind: Hashable) -> Run | None:
    """The function of vectors that computes calls of a kind, if it is kept."""
    return _kept.get(kind, _NEVER).run


def shared_of(
    kind: Hashable, scheme: PositionScheme, causal: bool, given: Arguments
) -> Shared | None:
    """What a call shares with later ones, if it is the second of its kind."""
    if (kept := _kept.get(kind)) is None:
        warns = may_warn(scheme, causal, given)  # as each such call should
        _put(kind, _SEEN if is_fixed(scheme) and not warns else _NEVER)
    return new_shared() if kept is _SEEN else None


def is_fixed(value: Any) -> bool:
    """Whether what equals ``value`` computes the same for ever: a scheme of posenc, of numbers.

    A class of somebody else's may hold or read what changes, and be equal all the same.
    """
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is tuple:
        return all(map(is_fixed, value))
    if not is_dataclass(value) or not type(value).__module__.startswith("posenc."):
        return False
    return all(is_fixed(getattr(value, each.name)) for each in fields(value) if each.compare)


def keep(kind: Hashable, made: OfVectors | None) -> None:
    """Keep the function that computes calls of a kind, or that there is none."""
    fits = made is not None and made.numbers is not None and 2 * made.numbers <= LIMIT
    _put(kind, made if made is not None and fits else _NEVER)


def _put(kind: Hashable, kept: OfVectors) -> None:
    with _writing:
        _kept.pop(kind, None)
        _kept[kind] = kept
        total = sum(each.numbers or 0 for each in _kept.values())
        for oldest in list(_kept):
            if total <= LIMIT and len(_kept) <= _CALLS:
                break
            total -= _kept.pop(oldest).numbers or 0
