"""One RoPE dictionary of a configuration, and the ``RoPE`` that it describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posenc.contract.checks import check_count, check_positive, nearest
from posenc.hf import keys
from posenc.schemes.rope import Layout, RoPE
from posenc.schemes.scalings import (
    NTK,
    PI,
    DynamicNTK,
    Llama3,
    LongRoPE,
    Proportional,
    Scaling,
    YaRN,
)


@dataclass(frozen=True)
class Surroundings:
    """What the rest of a configuration says about one RoPE dictionary.

    Attributes
    ----------
    where
        The name of the dictionary, for errors.
    head_dim
        Channels per head, None if unknown.
    max_len
        ``max_position_embeddings``, None if unknown.
    original_len
        ``original_max_position_embeddings`` outside of the dictionary, which has priority there.
    layout
        Which channels pair up.
    softmax
        Whether YaRN's ``mscale_all_dim`` multiplies the softmax scale.
    long
        Whether a type ``yarn`` is LongRoPE.
    """

    where: str = "rope_parameters"
    head_dim: int | None = None
    max_len: int | None = None
    original_len: int | None = None
    layout: Layout = "half"
    softmax: bool = False
    long: bool = False


@dataclass(frozen=True)
class Entry:
    """A RoPE dictionary, read: its scheme, and what is not in the scheme.

    Attributes
    ----------
    rope
        The scheme.
    kept
        Keys that do not concern the frequencies, with their values.
    unknown
        Keys that this version does not know, with their values.
    notes
        What was filled in, and where transformers reads something else.
    accepted
        The keys that this type knows.
    """

    rope: RoPE
    kept: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def read_parameters(given: Mapping[str, Any], around: Surroundings) -> Entry:
    """The ``RoPE`` of one dictionary, in the form of transformers 4 or 5.

    Raises
    ------
    TypeError, ValueError
        A value is wrong, or a key is missing. The error names it, and the dictionary.
    """
    reader = _Reader(given, around)
    try:
        rope = reader.rope()
    except (TypeError, ValueError) as error:
        raise type(error)(f"{around.where}: {error}") from error
    return reader.entry(rope)


class _Reader:
    """Reads one dictionary; what ``get`` has read is not unknown."""

    def __init__(self, given: Mapping[str, Any], around: Surroundings) -> None:
        self.given, self.around, self.notes = given, around, list[str]()
        self.kind = self._kind()

    def _kind(self) -> str:
        given = [self.given[key] for key in ("rope_type", "type") if self.given.get(key)]
        for name in given:
            if not isinstance(name, str):
                raise TypeError(f"{self.around.where}: rope_type must be a name, got {name!r}")
        names = set(given)
        kinds = {keys.ALIASES.get(name, name) for name in names}
        kinds -= {"default"} if "mrope" in names else set()
        if len(kinds) > 1:
            both = " and ".join(repr(self.given[key]) for key in ("rope_type", "type"))
            raise ValueError(f"{self.around.where}: rope_type and type differ: {both}")
        kind = kinds.pop() if kinds else "default"
        if kind == "yarn" and self.around.long:
            kind = "longrope"
        if kind == "axial":
            raise ValueError(
                f"{self.around.where}: rope_type 'axial' rotates by two coordinates of an image; "
                "RoPE has one position; see posenc.schemes for schemes with several axes"
            )
        if kind not in keys.KINDS:
            known = [*keys.KINDS, *keys.ALIASES]
            raise ValueError(
                f"{self.around.where}: unknown rope_type {kind!r}{nearest(kind, known)}"
            )
        return kind

    def rope(self) -> RoPE:
        around, base = self.around, self.given.get("rope_theta")
        if base is None:
            raise ValueError("rope_theta is missing, here and beside rope_scaling")
        if around.head_dim is None:
            raise ValueError(
                "head_dim is missing: give it as an argument, or a whole configuration"
            )
        dim, scaling = self.rotary_dim(around.head_dim), self.scaling()
        return RoPE(
            around.head_dim,
            check_positive("rope_theta", base),
            layout=around.layout,
            rotary_dim=None if dim == around.head_dim else dim,
            scaling=scaling,
        )

    def rotary_dim(self, head_dim: int) -> int:
        part, dim = self.given.get("partial_rotary_factor"), self.given.get("rotary_dim")
        if self.kind == "proportional":
            return head_dim
        if part is None:
            return head_dim if dim is None else dim
        width = int(head_dim * check_positive("partial_rotary_factor", part))
        if width > head_dim:
            raise ValueError(f"partial_rotary_factor must be at most 1, got {part!r}")
        if width % 2 or not width:
            raise ValueError(
                f"partial_rotary_factor {part!r} of head_dim={head_dim} is {width} channels; "
                "rotation acts on pairs"
            )
        if dim is not None and dim != width:
            raise ValueError(
                f"rotary_dim={dim} and partial_rotary_factor={part!r}, which is {width} of "
                f"head_dim={head_dim}, differ"
            )
        return width

    def scaling(self) -> Scaling | None:
        given = self.given
        if self.kind == "default":
            return None
        if self.kind == "linear":
            return PI(self.needed("factor"))
        if self.kind == "proportional":
            return Proportional(given.get("partial_rotary_factor", 1.0), given.get("factor", 1.0))
        if self.kind == "dynamic":
            return self.dynamic()
        if self.kind == "llama3":
            low, high = self.needed("low_freq_factor"), self.needed("high_freq_factor")
            return Llama3(self.needed("factor"), low, high, self.original_len())
        if self.kind == "yarn":
            return self.yarn()
        return self.longrope()

    def dynamic(self) -> Scaling:
        if self.given.get("alpha"):
            self.notes.append("alpha is a fixed NTK factor (Hunyuan); factor is not read")
            return NTK(self.given["alpha"])
        own, max_len = self.given.get("original_max_position_embeddings"), self.around.max_len
        if own is not None and max_len is not None and own != max_len:
            raise ValueError(
                f"original_max_position_embeddings={own} and max_position_embeddings={max_len} "
                "differ; transformers reads the latter under rope_type 'dynamic'; drop one"
            )
        length = max_len if own is None else own
        if length is None:
            raise ValueError("max_position_embeddings is missing")
        check_count("original_max_position_embeddings", length)
        return DynamicNTK(self.needed("factor"), length)

    def yarn(self) -> Scaling:
        for key, read in (("beta_fast", 32), ("beta_slow", 1)):
            if self.given.get(key) == 0:
                raise ValueError(
                    f"{key} must be greater than 0, got 0, which transformers reads as {read}"
                )
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        options = {n: self.given[n] for n in (*names, "truncate") if self.given.get(n) is not None}
        if self.around.softmax and options.get("mscale_all_dim"):
            options["apply_to"] = "scale"
            self.notes.append("the softmax scale is multiplied by m(s, mscale_all_dim)**2 too")
        length = self.original_len()
        return YaRN(self.factor(length), length, **options)

    def longrope(self) -> Scaling:
        short, long = self.needed("short_factor"), self.needed("long_factor")
        length = self.original_len()
        attention = self.given.get("attention_factor")
        by_length = [self.given[k] for k in ("short_mscale", "long_mscale") if k in self.given]
        if by_length and by_length[0] != by_length[-1]:
            raise ValueError(
                "short_mscale and long_mscale differ; LongRoPE has one attention factor, "
                f"got {self.given['short_mscale']!r} and {self.given['long_mscale']!r}"
            )
        if by_length:
            attention = by_length[0]
            self.notes.append("short_mscale and long_mscale are the attention factor (Phi-3.5-MoE)")
        factor = self.factor(length) if attention is None else self.given.get("factor")
        factor = None if factor == 1 else factor
        return LongRoPE(short, long, length, factor=factor, attention_factor=attention)

    def factor(self, original_len: int) -> float:
        """``factor``, or how many times longer than at first the context is."""
        given, max_len = self.given.get("factor"), self.around.max_len
        if given is not None:
            return check_positive("factor", given)
        if max_len is None:
            raise ValueError("factor is missing, and so is max_position_embeddings")
        self.notes.append(f"factor is missing: {max_len} / {original_len}, from the lengths")
        return max_len / original_len

    def original_len(self) -> int:
        """``original_max_position_embeddings``, or ``max_position_embeddings`` without it."""
        own, outer = self.given.get("original_max_position_embeddings"), self.around.original_len
        length: int | None = own if outer is None else outer
        if None not in (own, outer) and own != outer:
            self.notes.append(
                f"original_max_position_embeddings is {outer} in the configuration, which has "
                f"priority, and {own} here"
            )
        if length is not None:
            return check_count("original_max_position_embeddings", length)
        if self.around.max_len is None:
            raise ValueError(
                "original_max_position_embeddings is missing, and so is max_position_embeddings"
            )
        self.notes.append(
            "original_max_position_embeddings is missing: "
            f"{self.around.max_len}, max_position_embeddings"
        )
        return self.around.max_len

    def needed(self, key: str) -> Any:
        if self.given.get(key) is None:
            raise ValueError(f"{key} is missing; rope_type {self.kind!r} needs it")
        return self.given[key]

    def entry(self, rope: RoPE) -> Entry:
        kind = keys.KINDS[self.kind]
        accepted = (*keys.EVERY, *kind.needed, *kind.optional)
        if self.given.get("alpha"):
            accepted += keys.WITH_ALPHA
        rest = {key: value for key, value in self.given.items() if key not in accepted}
        return Entry(
            rope,
            kept={key: value for key, value in rest.items() if key in keys.KEPT},
            unknown={key: value for key, value in rest.items() if key not in keys.KEPT},
            notes=tuple(self.notes),
            accepted=(*accepted, *keys.KEPT),
        )


def to_hf(rope: RoPE) -> dict[str, Any]:
    """The dictionary ``rope_parameters`` of transformers 5 for a ``RoPE``."""
    if rope.param_specs():
        raise ValueError("transformers has no rope_type for learned frequencies")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.rotary_dim is not None and rope.rotary_dim < rope.head_dim:
        parameters["partial_rotary_factor"] = _part(rope.rotary_dim, rope.head_dim)
    return parameters | (_scaling_to_hf(rope.scaling, rope) if rope.scaling is not None else {})


def _scaling_to_hf(scaling: Scaling, rope: RoPE) -> dict[str, Any]:
    length = {"original_max_position_embeddings": getattr(scaling, "train_len", None)}
    match scaling:
        case PI(factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicNTK(factor):
            return {"rope_type": "dynamic", "factor": factor} | length
        case Proportional(p, factor):
            divided = {} if factor == 1 else {"factor": factor}
            return {"rope_type": "proportional", "partial_rotary_factor": p} | divided
        case Llama3(factor, low, high):
            factors = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3"} | factors | length
        case LongRoPE(short, long, _, factor, attention):
            given = {"factor": factor or 1.0, "attention_factor": attention}
            lists = {"short_factor": list(short), "long_factor": list(long)}
            return {"rope_type": "longrope"} | lists | length | _without_none(given)
        case YaRN(ramp="index"):
            names = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale")
            options = {n: getattr(scaling, n) for n in (*names, "mscale_all_dim")}
            truncate = {} if scaling.truncate else {"truncate": False}
            if scaling.apply_to == "angles":
                return {"rope_type": "yarn"} | length | _without_none(options) | truncate
    raise ValueError(f"transformers has no rope_type for {_named(scaling, rope)}")


def _named(scaling: Scaling, rope: RoPE) -> str:
    dim = rope.rotary_dim or rope.head_dim
    if isinstance(scaling, NTK) and dim > 2:
        base = rope.base * scaling.factor ** (dim / (dim - 2))
        return f"{scaling!r}; it is plain RoPE with base={base!r}"
    if isinstance(scaling, YaRN):
        option = "ramp" if scaling.ramp != "index" else "apply_to"
        return f"YaRN with {option}={getattr(scaling, option)!r}"
    return repr(scaling)


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _part(dim: int, head_dim: int) -> float:
    """The float ``p`` for which ``int(head_dim * p)`` is ``dim``."""
    part = dim / head_dim
    return part if int(head_dim * part) == dim else math.nextafter(part, math.inf)
