"""The laws, by what they speak of. Importing this package enters all of them."""

from posenc.testing.lawbook import attention, bias, claims, equivalence, frameworks, scheme, tokens

__all__ = ["attention", "bias", "claims", "equivalence", "frameworks", "scheme", "tokens"]
