"""ALiBi without a causal mask: what the bias of keys after the query is.

================  ============================================================================
``noncausal``     bias of keys after the query
================  ============================================================================
``"symmetric"``   the same as before the query
``"asymmetric"``  the first ``H/2`` heads see keys up to the query, the others keys from the query
                  on. A rule gives each half the slopes of ``H/2`` heads. ``H`` is even
``"two_sided"``   slopes of their own: ``later_slopes``, ``H`` finite numbers. Default: a learned
                  array ``later_slopes (H,)`` that starts from the other slopes
``"offset"``      ``-m_h * |i - j| + m_h / 2``, so that keys at distance ``n`` on both sides differ
================  ============================================================================

All but the first are in wide use for encoders, and in none of the paper's equations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from posenc.contract.checks import check_per_head
from posenc.contract.protocol import Array, Arrays, Hook, Namespace, ParamSpec, PositionScheme

Noncausal = Literal["symmetric", "asymmetric", "two_sided", "offset"]
Slopes = tuple[float, ...]


class EncoderALiBi(PositionScheme, relative=True):
    """Base of ``ALiBi``, with the forms of its bias for keys after the query."""

    num_heads: int
    noncausal: Noncausal
    learned: bool
    later_slopes: Sequence[float] | None
    _slopes: Slopes

    def interpolate(self, slopes: Array) -> Array:
        """Slopes at the length of the context."""
        raise NotImplementedError

    def check_forms(self) -> None:
        """Check ``noncausal`` and ``later_slopes``; leave out a hook that one of them excludes."""
        if self.noncausal == "asymmetric" and self.num_heads % 2:
            raise ValueError(
                f"noncausal='asymmetric' needs an even num_heads, got {self.num_heads}: "
                "half of the heads see earlier keys, half see later ones"
            )
        if self.noncausal == "asymmetric":
            self._leave_out(Hook.KEY_BIAS)
        if self.later_slopes is not None:
            if self.noncausal != "two_sided":
                raise ValueError(
                    f"later_slopes needs noncausal='two_sided', got {self.noncausal!r}"
                )
            later = check_per_head("later_slopes", self.later_slopes, self.num_heads)
            object.__setattr__(self, "later_slopes", later)

    def with_later_keys(
        self, before: Array, m: Array, q: Array, k: Array, *, params: Arrays,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        """The bias of all keys; ``before`` is that of keys up to the query, of slopes ``m``."""
        if self.noncausal == "asymmetric":
            return xp.where(params["side"] * xp.astype(q - k, m.dtype) >= 0, before, -xp.inf)
        if self.noncausal == "offset":
            return xp.where(k > q, before + m / 2, before)
        if self.noncausal == "two_sided":
            later = self.interpolate(params["later_slopes"])
            return xp.where(k > q, later * xp.astype(q - k, m.dtype), before)
        return before

    def param_specs(self) -> Mapping[str, ParamSpec]:
        learned = {name: values for name, (values, learns) in self._arrays().items() if learns}
        return {name: ParamSpec.of_values(values) for name, values in learned.items()}

    def constants(self) -> Mapping[str, Slopes]:
        return {name: values for name, (values, learns) in self._arrays().items() if not learns}

    def _arrays(self) -> dict[str, tuple[Slopes, bool]]:
        """The numbers per head that the bias reads, by name, and whether each is learned."""
        arrays = {"slopes": (self._slopes, self.learned)}
        half, given = self.num_heads // 2, self.later_slopes
        if self.noncausal == "asymmetric":
            arrays["side"] = ((1.0,) * half + (-1.0,) * half, False)
        if self.noncausal == "two_sided":
            later = self._slopes if given is None else tuple(given)
            arrays["later_slopes"] = (later, self.learned or given is None)
        return arrays

    def caution(self, *, causal: bool) -> str | None:
        if causal and self.noncausal == "asymmetric":
            return "causal=True masks later keys, so half of the heads see only the query's own key"
        if causal and self.noncausal == "two_sided":
            return "causal=True masks later keys, so later_slopes are never read"
        return None
