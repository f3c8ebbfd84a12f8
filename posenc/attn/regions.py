"""Regions of distances, each with a scheme of its own: one call for each, merged afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from posenc.apply.bias import has_bias
from posenc.apply.feature_needs import has_features
from posenc.attn.arguments import Arguments
from posenc.attn.masks import Mask
from posenc.contract.params import as_mapping
from posenc.contract.protocol import Array, Hook, PositionScheme, Window
from posenc.contract.tokens import Tokens

if TYPE_CHECKING:
    from posenc.attn.call import Call


def with_regions(
    call: Call, params: Mapping[str, Array] | None, given: Arguments, prepare: Callable[..., Call]
) -> Call:
    """The call with one call for each region of distances."""
    if given.k_transformed:
        raise ValueError(
            f"k_transformed=True: {type(call.scheme).__name__} transforms keys in several ways; "
            "cache raw keys"
        )
    parts: list[Call] = []
    regions = call.scheme.regions()
    _check_no_overlap(type(call.scheme).__name__, regions)
    _check_sinks(call.scheme, regions)
    of_all = given.scale is not None or Hook.SCALE in call.scheme.hooks()
    numbered = list(enumerate(regions))
    if call.causal:  # keys after the query, at distances below 0, are not visible
        before = [(n, r) for n, r in numbered if r[1][0] is None or r[1][0] >= 0]
        numbered = before or numbered
    for n, (part, window) in numbered:
        part_params = {
            name: array for name, array in as_mapping(params).items() if name in part.param_specs()
        }
        own = given._replace(
            window=None, mask=call.mask, return_lse=False, scale=call.scale if of_all else None,
            tokens=_of_region(given.tokens, n, part), queries=_of_region(given.queries, n, part),
        )  # fmt: skip
        part_call = prepare(
            call.q, call.k, call.v, part, part_params, call.causal, own,
            skip_blocks=call.skip_blocks, xp=call.xp,
        )  # fmt: skip
        for inner in part_call.regions or (part_call,):
            of_inner = _in_region(inner.mask, window)
            if not _is_empty(of_inner.window):
                # Regions are merged by their log-sum-exp.
                parts.append(replace(inner, mask=of_inner, wants_lse=True))
    return replace(call, regions=tuple(parts))


def _check_sinks(
    scheme: PositionScheme, regions: tuple[tuple[PositionScheme, Window], ...]
) -> None:
    """Check that no region has a sink of its own: a row has one denominator."""
    for part, window in regions:
        if Hook.SINK in part.hooks() and Hook.SINK not in scheme.hooks():
            name = type(scheme).__name__
            raise ValueError(
                f"{name}: the scheme of a region must have no sink, got {type(part).__name__} in "
                f"the region {window}; put the sink around the whole: Sink({name}(...))"
            )


def _check_no_overlap(name: str, regions: tuple[tuple[PositionScheme, Window], ...]) -> None:
    """Check that no distance is in two regions, where its keys would count twice.

    Where a region has a bias, which may mask keys that another region has, a law checks it.
    """
    ends = []
    for _, window in regions:
        if not isinstance(window, tuple) or len(window) != 2:
            raise ValueError(f"{name}: the window of a region must be (left, right), got {window}")
        left, right = window
        ends.append((-math.inf if right is None else -right, math.inf if left is None else left))
    for n, (low, high) in enumerate(ends):
        for other, (low_too, high_too) in enumerate(ends[:n]):
            masks = has_bias(regions[n][0]) or has_bias(regions[other][0])
            if max(low, low_too) <= min(high, high_too) and not masks:
                both = f"{regions[other][1]} and {regions[n][1]}"
                raise ValueError(f"{name}: windows of regions must not overlap, got {both}")


def _in_region(mask: Mask, window: Window) -> Mask:
    """A mask with only the distances of a region, wherever the first tokens are."""
    left, right = window
    return Mask(left=left, right=right) & mask


def _of_region(tokens: Tokens | None, n: int, part: PositionScheme) -> Tokens | None:
    """The tokens for the scheme ``part`` of region ``n``."""
    if tokens is None:
        return None
    rotary = tokens.rotary and tokens.rotary.regions[n]
    # Features may belong to a Sink around the regions.
    features = tokens.features if has_features(part) else None
    return replace(tokens, rotary=rotary, features=features)


def _is_empty(window: Window | None) -> bool:
    """Whether no distance is in a window."""
    left, right = window or (None, None)
    return left is not None and right is not None and left + right < 0
