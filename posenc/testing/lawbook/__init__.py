"""The laws, one module per subject. Importing this package registers all of them."""

from posenc.testing.lawbook import (
    attention,
    bias,
    claims,
    equivalence,
    frameworks,
    heads,
    offsets,
    queries,
    regions,
    rows,
    scheme,
    tokens,
)

__all__ = [
    "attention", "bias", "claims", "equivalence", "frameworks", "heads", "offsets", "queries",
    "regions", "rows", "scheme", "tokens",
]  # fmt: skip
