"""The interface of a positional encoding: ``PositionScheme``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from posenc.contract.checks import check_scheme
from posenc.contract.facts import Facts
from posenc.contract.hooks import Hook, Hooked
from posenc.contract.operations import hold
from posenc.contract.specs import (
    Array,
    Arrays,
    FeatureSpec,
    Initializer,
    Namespace,
    ParamSpec,
    Role,
    Window,
)  # fmt: skip

__all__ = [
    "Array", "Arrays", "FeatureSpec", "Hook", "Initializer", "Namespace", "ParamSpec",
    "PositionScheme", "Role", "SchemeWarning", "Window",
]  # fmt: skip


class SchemeWarning(UserWarning):
    """A call is allowed, but it probably does not do what its author wants."""


class PositionScheme(Hooked, Facts):
    """Base class of positional encodings.

    A scheme may act on token embeddings (``embedding``), on queries and keys (``transform``), and
    on attention scores (``bias``). A scheme is a frozen dataclass that inherits from this class.
    It overrides the methods that it needs; every method has a default that changes nothing.

    Methods are pure functions of *positions*. Positions are integers in any order. Methods do not
    see sequence lengths, array indices or masks, so caches, packing and padding need no code. The
    exceptions are ``at_length``, which gets a length, and ``adjust_scores``, which gets a mask.

    The arguments that methods share:

    ``params``
        Learned arrays (``param_specs``) and fixed numbers (``constants``), by name.
    ``xp``
        The Array API namespace of the arrays: that of NumPy, PyTorch or JAX.

    Hyperparameters are fields of the dataclass, checked as they are annotated
    (``posenc.contract.fields``). NumPy numbers in them become Python numbers before
    ``__post_init__`` runs. Facts are class keywords (``posenc.contract.facts``):
    ``class ALiBi(PositionScheme, relative=True)``.

    If a bias depends on more than positions, ``feature_specs`` declares *features*: named arrays,
    computed once per token from its hidden state, query or key. ``bias`` and ``key_bias`` read them
    as ``params.query[name]`` and ``params.key[name]``. ``transform`` reads those of its own tokens
    as ``params.of(role)[name]``.

    Letters in shapes: ``B`` batch, ``H`` heads, ``Hk`` heads of keys and values, ``L`` tokens,
    ``Q`` queries, ``K`` keys, ``D`` head_dim, ``C`` width of hidden states, ``M`` size of a table.
    """

    @classmethod
    def fitted(cls, sizes: Mapping[str, int]) -> Mapping[str, Any]:
        """Return defaults of options that follow from sizes of a model, for ``posenc.make``.

        ``sizes`` has those that are known, as ``{"train_len": 512}``. Options of the caller, and
        fields named like a size, need no entry.
        """
        return {}

    def param_specs(self) -> Mapping[str, ParamSpec]:
        """Learned arrays, by name."""
        return {}

    def constants(self) -> Mapping[str, tuple[float, ...]]:
        """Fixed numbers, one per head, by name. Methods read them from ``params``."""
        return {}

    def feature_specs(self) -> Mapping[str, FeatureSpec]:
        """Features of tokens that ``bias``, ``key_bias`` and ``transform`` read, by name."""
        return {}

    # Where a scheme acts: embeddings, queries and keys, scores.

    def embedding(self, pos: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return the term to add to token embeddings, ``pos.shape + (dim,)``; None for no term.

        With several ``axes``, ``pos`` holds places ``(..., L, axes)``, and the result is
        ``(..., L, dim)``.
        """
        return None

    def transform(
        self, x: Array, pos: Array, *, role: Role, params: Arrays, xp: Namespace
    ) -> Array:
        """Transform queries or keys ``x (..., L, D)`` by their positions, as RoPE rotates them.

        Tokens and heads are transformed independently. The result is finite at any position.

        Parameters
        ----------
        x
            Queries ``(..., L, D)`` if ``role`` is ``"query"``, keys if it is ``"key"``.
        pos
            Positions, which broadcast to ``(..., L)``. With several ``axes``: places
            ``(..., L, axes)``.
        params
            A per-head scalar has shape ``(H, 1, 1)``, which broadcasts against ``pos[..., None]``.
            For a per-head array with more axes, ``params[name][:]`` is ``(H, 1, ...)``, which
            broadcasts against ``x``. Grouped-query keys can use per-head params ``of_keys`` only.
            ``params.of(role)`` holds the features of these tokens, ``(B, H, L)`` or
            ``(B, H, L, M)``. ``self.tables(x, pos, params=params, xp=xp)`` is their ``rotary``.

        Returns
        -------
        ``(..., L, E)`` in the dtype of ``x``. ``E`` is ``D`` or more, and the same for queries and
        keys: PoPE makes two channels of one. ``scale`` still gets ``D``.
        """
        return x

    def rotary(self, pos: Array, *, dtype: Any, params: Arrays, xp: Namespace) -> Arrays:
        """Compute what ``transform`` needs from positions alone, as RoPE its sines and cosines.

        ``transform`` gets them by ``self.tables(x, pos, ...)``. A model computes them once for all
        layers, queries and keys (``posenc.rotary``). So they depend neither on vectors nor on
        arrays ``of_keys``.

        Parameters
        ----------
        pos
            Positions ``(..., L)``. With several ``axes``: places ``(..., L, axes)``.
        dtype
            float32 or float64.
        params
            As in ``transform``, without features.

        Returns
        -------
        Name -> ``(..., L, n)`` of ``dtype``, which broadcasts against ``x (..., L, D)`` but for the
        last axis.
        """
        return {}

    def bias(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return the term to add to the scaled score of each query and key; None for no bias.

        Write it for one head and for one pair. The library calls it with positions ``q`` and ``k``
        that broadcast: single pairs, tiles or whole matrices.

        Parameters
        ----------
        q, k
            Integer positions of queries and keys.
        params
            A per-head scalar is 0-d or has shape ``(H, 1, 1)``. A per-head table is read by index,
            ``params[name][i]``. Features of queries are in ``params.query``, those of keys in
            ``params.key``: a feature ``(B, H, L)`` broadcasts, a feature ``(B, H, L, M)`` is read
            by index.

        Returns
        -------
        An array that broadcasts with ``q`` and ``k``, computed elementwise. ``-inf`` masks a pair.
        Every other value, and every gradient, is finite for all positions, also for masked pairs.
        The function must not close over arrays.
        """
        return None

    def key_bias(self, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return ``w(k)`` if ``bias(q, k) = u(q) + w(k)`` for all ``k <= q``; else None.

        Under a causal mask an implementation may then use ``w`` instead of ``bias``: softmax
        ignores a term that depends on the query only. ``w`` must be finite, so a bias that masks
        has no ``key_bias``.
        """
        return None

    def constant_beyond(self) -> Window:
        """Return ``(left, right)``: how far a ``relative`` bias changes with distance.

        All keys at ``k - q <= -left`` have the same finite bias per head, and so have all keys at
        ``k - q >= right``. None: there is no such distance. Implementations may then read one
        number for far keys. A bias that reads features has none.
        """
        return None, None

    def bias_factor(self, q: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return the factor of the bias of all parts of a ``Sum`` with this part; None for 1.

        Only ``Sum`` calls it, as it calls ``bias`` (Inkling's log-position scaling multiplies
        queries and bias). The factor is positive and finite.
        """
        return None

    # Rarer ways to act on attention.

    def channel_decay(self, q: Array, k: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return the logarithm of what each channel of a score keeps; None if it keeps all.

        The score of a query and a key up to it (``k <= q``) is
        ``scale * sum_n q_n k_n exp(decay_n)``, with the channels ``n`` of transformed queries and
        keys. That of a later key does not change. Decays add up along the way::

            decay(q, k) = decay(q, a) + decay(a, k)  for  k <= a <= q

        So they are 0 at ``q = k`` and 0 at most, and the library may take them relative to any
        anchor ``a`` between query and key: no factor is larger than 1 (Wall).

        Parameters
        ----------
        q, k
            Integer positions, whose last axis of 1 is that of channels. An anchor may stand for
            either.
        params
            A per-head array ``(H, D)`` has shape ``(H, 1, ..., D)``, and one ``(H,)`` is
            ``(H, 1, ..., 1)``. ``params.query`` and ``params.key`` have the ``cumulative`` features
            of both tokens; their last axis is ``M``, or 1.

        Returns
        -------
        An array that broadcasts with ``q`` and ``k``, with ``D`` or 1 on its last axis, computed
        elementwise; finite for all positions, also for later keys and other segments.
        """
        return None

    def adjust_scores(
        self, scores: Array, q: Array, k: Array, *, visible: Array | None, params: Arrays,
        xp: Namespace,
    ) -> Array:  # fmt: skip
        """Change whole rows of scaled scores ``(B, H, Q, K)``, before the bias is added.

        For schemes that cannot be computed tile by tile (CoPE, DAPE). A score of ``-inf`` hides the
        key from the query (TRA). ``chunked`` calls it for some queries at a time, the reference for
        all of them.

        Parameters
        ----------
        scores
            Scaled scores of every query and key.
        q, k
            Positions ``(B or 1, 1, Q, 1)`` and ``(B or 1, 1, 1, K)``.
        visible
            Which pairs the mask leaves visible, booleans; None if all are. The score of one key
            may depend on another key of the row only if that key is visible.
        params
            As for ``bias``, for all heads at once. Of a per-head array with more axes,
            ``params[name][:]`` is ``(H, 1, ...)``; of a feature ``(B, H, L, M)``,
            ``params.query[name][:]`` is the whole array. If the call has segments,
            ``params.query["segment"]`` and ``params.key["segment"]`` are shaped as ``q`` and ``k``.
        """
        return scores

    def sink(self, q: Array, *, params: Arrays, xp: Namespace) -> Array | None:
        """Return a logit to add to each query's softmax denominator; None for no sink.

        It belongs to no key and has no value, so a head can attend to nothing. gpt-oss learns one
        logit per head; the constant 0 gives the off-by-one softmax.

        ``q (B or 1, 1, Q, 1)`` are positions. The result broadcasts to ``(B, H, Q, 1)``. ``params``
        and ``params.query`` are those of ``bias``.
        """
        return None

    def regions(self) -> tuple[tuple[PositionScheme, Window], ...]:
        """Return schemes for different ranges of distance, each with its window; empty for none.

        Attention is computed once per region, and the results are merged by log-sum-exp (ReRoPE,
        Self-Extend). A window ``(left, right)`` is that of ``attention``:
        ``-left <= k_pos - q_pos <= right``. Windows overlap only where all but one of their schemes
        mask a pair by a bias of ``-inf`` (dual chunk attention). A negative ``right`` leaves out
        near keys. A negative ``left`` leaves out keys up to the query and near ones after it;
        under a causal mask such a region is not computed. Each scheme receives the params that it
        declares. It may have regions itself, and its own ``scale``, unless this scheme or the
        caller sets one for all. It may have no ``sink``: that belongs to the whole row.

        Make the schemes in ``__post_init__``, because torch's compiler cannot construct a RoPE.
        """
        return ()

    def scale(self, head_dim: int) -> float:
        """Return the factor of the scores ``q @ k.T``, which applies before the bias."""
        return 1 / math.sqrt(head_dim)

    def at_length(self, length: int) -> PositionScheme:
        """Return the scheme for a context of ``length`` tokens (dynamic NTK, LongRoPE)."""
        return self

    def caution(self, *, causal: bool) -> str | None:
        """Return why attention with this mask is probably a mistake; None if it is not.

        Attention issues it as a ``SchemeWarning`` and computes the result anyway.
        """
        return None

    def tables(self, x: Array, pos: Array, *, params: Arrays, xp: Namespace) -> Arrays:
        """Return the ``rotary`` of vectors ``x`` at ``pos``: the caller's, or else computed here.

        ``transform`` calls it with its own arguments.
        """
        given: Arrays | None = getattr(params, "rotary", None)
        if given:
            return given
        work = xp.float64 if x.dtype == xp.float64 else xp.float32
        return hold(self.rotary(pos, dtype=work, params=params, xp=xp), xp)

    # What the library asks of a scheme, as ``hooks()``. A combination of schemes overrides these.

    def bias_terms(self) -> tuple[tuple[str, PositionScheme], ...]:
        """Return schemes whose biases add up to ``bias``, each with the prefix of its names.

        The prefix is that of its params and features among those of this scheme.
        """
        return (("", self),) if Hook.BIAS in self.hooks() else ()

    def rotary_params(self) -> frozenset[str]:
        """Return the names of the learned arrays that ``rotary`` may read."""
        names: set[str] = set()
        if Hook.ROTARY in self.hooks():
            names.update(name for name, spec in self.param_specs().items() if not spec.of_keys)
        for scheme, _ in self.regions():
            names.update(scheme.rotary_params())
        return frozenset(names)

    @staticmethod
    def _check_field(name: str, value: Any) -> None:
        check_scheme(value)
