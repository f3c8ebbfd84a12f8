"""Which width of hidden states the features of a scheme accept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from array_api_compat import array_namespace

from posenc.apply.feature_needs import by_role, lookback, own_tokens, reads_hidden
from posenc.apply.shapes import prepare_params
from posenc.attn.earlier import with_earlier
from posenc.contract.params import Params
from posenc.contract.protocol import Array, PositionScheme, Role

_DEFAULT_WIDTH = 16  # for a scheme that accepts hidden states of any width
_ROLES: tuple[Role, Role] = ("query", "key")


def hidden_width(scheme: PositionScheme, params: Mapping[str, Array]) -> int:
    """The width ``C`` of hidden states that a scheme accepts; 0 if it reads none.

    Tries the sizes of its params, which must be NumPy arrays.
    """
    if not reads_hidden(scheme):
        return 0
    like = np.zeros(1)
    xp = array_namespace(like)  # imported here: it brings parts of NumPy that are slow to import
    arrays, work = prepare_params(scheme, params, like=like, dtype=None, xp=xp)
    whole, n = Params(arrays, work), lookback(scheme)
    shapes = [spec.shape for spec in scheme.param_specs().values()]
    # A head may read a part of the hidden state.
    sizes = {times * size for shape in shapes for size in shape for times in (1, shape[0])}
    # One matrix may read those of several tokens.
    sizes |= {size // (n + 1) for size in sizes if size % (n + 1) == 0}
    for width in sorted(sizes | {_DEFAULT_WIDTH}, reverse=True):
        x = np.zeros((1, 1, width), np.float32)
        seen = {"query": x, "key": with_earlier(x, n, xp=xp) if n else x}
        try:
            for role in _ROLES:
                for spec in by_role(scheme.feature_specs(), "hidden")[role].values():
                    most = n if role == "key" else 0
                    own = own_tokens(seen[role], most, spec.lookback)
                    spec.compute(own, params=whole, xp=xp)
        except (TypeError, ValueError, IndexError):
            continue
        return width
    raise ValueError(
        f"hidden_dim: the features of {scheme} accept hidden states of none of the widths "
        f"{sorted(sizes)}"
    )
