"""Places ``(time, height, width)`` of text mixed with images and videos, for M-RoPE.

Wang et al. 2024, "Qwen2-VL", arXiv 2409.12191, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from posenc.contract.checks import check_choice, check_count, check_positive
from posenc.contract.tokens import Tokens
from posenc.positions.integers import MAX_POSITION

Host: TypeAlias = np.ndarray[Any, Any]
Following = Literal["max", "side"]


@dataclass(frozen=True)
class Patches:
    """The tokens of an image or a video, frame by frame, row by row.

    Parameters
    ----------
    height, width
        Rows and columns of tokens, after the model has merged patches.
    frames
        Frames of tokens.
    step
        Steps of time from frame to frame; products with the frame's number are rounded down.
        Qwen2.5-VL has ``tokens_per_second`` times the seconds of a frame for videos.
    """

    height: int
    width: int
    frames: int = 1
    step: float = 1.0

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames"):
            check_count(name, getattr(self, name))
        if check_positive("step", self.step) * (self.frames - 1) > MAX_POSITION:
            raise ValueError(f"step {self.step} takes {self.frames} frames beyond place 2**30 - 1")

    @classmethod
    def of_grid(
        cls, grid: Sequence[int], *, merge: int = 2, merge_frames: int = 1, step: float = 1.0
    ) -> Patches:
        """The tokens of ``(frames, height, width)`` patches: a row of transformers' ``grid_thw``.

        ``merge * merge`` patches, of ``merge_frames`` frames, become one token. The processor of
        Qwen3-VL gives each frame of a video as an image of its own, with its time as text before.

        >>> Patches.of_grid((1, 4, 6))
        Patches(height=2, width=3, frames=1, step=1.0)
        """
        if not hasattr(grid, "__len__") or len(grid) != 3:
            raise ValueError(f"grid must be (frames, height, width), got {grid!r}")
        sizes = [check_count("grid", size) for size in grid]
        parts = [check_count("merge_frames", merge_frames), *[check_count("merge", merge)] * 2]
        if any(size % part for size, part in zip(sizes, parts, strict=True)):
            raise ValueError(f"grid must be multiples of {tuple(parts)}, got {tuple(sizes)}")
        frames, height, width = (size // part for size, part in zip(sizes, parts, strict=True))
        return cls(height, width, frames, step)

    def __len__(self) -> int:
        return self.frames * self.height * self.width

    def places(self) -> Host:
        """Places ``(len(self), 3)`` that begin at 0 on each axis."""
        indices = np.indices((self.frames, self.height, self.width)).reshape(3, -1).T
        times = np.floor(indices[:, 0] * float(self.step)).astype(np.int64)
        return np.column_stack([times, indices[:, 1:]])


Part: TypeAlias = "int | Patches"


def mixed(parts: Sequence[Part], *, following: Following = "max") -> tuple[Host, int]:
    """Places of one sequence of text and images, and what to add to positions after it.

    Text has equal coordinates on all axes, one more for each token. Tokens of an image begin where
    text would go on, and count rows and columns from there; all of one frame have the same time.

    Parameters
    ----------
    parts
        In order, the number of tokens of a text, or ``Patches``.
    following
        Where the part after an image or a video begins. ``"max"``: one after its largest
        coordinate, as in the paper. ``"side"``: after the larger of its height and width, as in
        transformers 5. They differ for a video that is longer than it is high and wide.

    Returns
    -------
    Places ``(L, 3)``, and ``delta``. The token at position ``p >= L`` has the place ``p + delta``,
    one more than the largest coordinate before it: see ``text_places``.

    >>> places, delta = mixed([2, Patches(2, 2), 1])
    >>> places.T.tolist()
    [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    >>> delta
    -2
    """
    check_choice("following", following, get_args(Following))
    _check_list("parts", parts, "numbers of text tokens, and Patches")
    start, made = 0, list[Host]()
    for part in parts:
        if isinstance(part, Patches):
            own = part.places()
            side = max(part.height, part.width)
            extent = side if following == "side" else 1 + int(own.max())
        else:
            extent = check_count("parts", part)
            own = text_places(np.arange(extent))
        made.append(start + own)
        start += extent
    places = np.concatenate(made)
    return places, int(places.max()) + 1 - len(places)


def _check_list(name: str, values: Any, accepted: str) -> None:
    """Check that ``values`` is a sequence with at least one entry."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} must be a list of {accepted}, got {values!r}")
    if not values:
        raise ValueError(f"{name} is empty; give {accepted}")


def hunyuan_mixed(parts: Sequence[Part], *, axes: int = 4) -> Host:
    """Places ``(L, axes)`` of one sequence for ``MRoPE`` with ``layout="hunyuan"``.

    The coordinates of a token are its index in the sequence, but the last three of an image's token
    are its column, its row and the number of the image. So decoding goes on at the index, with
    ``text_places(pos, axes=axes)``. HunyuanOCR has a token after each row and one around the image
    on both sides: ``[..., 1, Patches(height, width + 1), 1, ...]``.

    >>> hunyuan_mixed([1, Patches(1, 2)]).tolist()
    [[0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0]]
    """
    check_count("axes", axes, least=3)
    _check_list("parts", parts, "numbers of text tokens, and Patches")
    sizes = [len(p) if isinstance(p, Patches) else check_count("parts", p) for p in parts]
    places, at, image = text_places(np.arange(sum(sizes)), axes=axes), 0, 0
    for part, size in zip(parts, sizes, strict=True):
        if isinstance(part, Patches):
            if part.frames > 1:
                raise ValueError(f"frames must be 1, got {part.frames}: a frame is an image here")
            own = part.places()
            places[at : at + size, -3:] = np.column_stack(
                [own[:, 2], own[:, 1], 0 * own[:, 0] + image]
            )
            image += 1
        at += size
    return places


def text_places(pos: Host, delta: Any = 0, *, axes: int = 3) -> Host:
    """Places ``(..., L, axes)`` of text at positions ``pos (L,)`` or ``(B, L)``.

    Parameters
    ----------
    pos
        Positions of the tokens, in decoding those after the cached ones.
    delta
        What ``mixed`` returned for the sequence, or one number for each of ``B`` sequences.
    axes
        Number of axes.
    """
    pos, delta = np.asarray(pos), np.asarray(delta)
    for name, array in (("pos", pos), ("delta", delta)):
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"{name} must be integers, got {array.tolist()!r}")
    pos, delta = pos.astype(np.int64), delta.astype(np.int64)  # narrow integers would wrap around
    at = pos + (delta[:, None] if delta.ndim else delta)
    return np.broadcast_to(at[..., None], (*at.shape, check_count("axes", axes))).copy()


def packed_mixed(documents: Sequence[Sequence[Part]], *, following: Following = "max") -> Tokens:
    """The tokens of documents packed one after another: positions, segments, places ``(L, 3)``.

    Each document is ``parts`` of ``mixed``, and begins at 0 as if it were alone.
    """
    _check_list("documents", documents, "lists of parts")
    places = [mixed(parts, following=following)[0] for parts in documents]
    lengths = [len(own) for own in places]
    pos = np.concatenate([np.arange(n) for n in lengths])
    seg = np.repeat(np.arange(len(lengths)), lengths)
    return Tokens(pos, seg, np.concatenate(places))


def left_padded_mixed(
    documents: Sequence[Sequence[Part]], total: int, *, following: Following = "max"
) -> tuple[Tokens, Host]:
    """The tokens of left-padded documents, and the delta ``(B,)`` of each.

    Positions and which tokens exist are as in ``left_padded``, which counts from the first real
    token; so does the position to which a delta is added. Places are ``(B, total, 3)``, 0 in
    padding.
    """
    _check_list("documents", documents, "lists of parts")
    made = [mixed(parts, following=following) for parts in documents]
    longest = max(len(own) for own, _ in made)
    if longest > check_count("total", total):
        raise ValueError(f"documents must have 1 .. total={total} tokens, the longest {longest}")
    places = np.zeros((len(made), total, 3), np.int64)
    for row, (own, _) in zip(places, made, strict=True):
        row[total - len(own) :] = own
    pos = np.arange(total)[None, :] - (total - np.asarray([len(own) for own, _ in made]))[:, None]
    tokens = Tokens(np.maximum(pos, 0), places=places, exists=pos >= 0)
    return tokens, np.asarray([delta for _, delta in made])
