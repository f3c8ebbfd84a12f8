"""RoPE from a configuration of Hugging Face transformers, and back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.schemes.nope import NoPE
    from posenc.schemes.rope import RoPE


class OfHuggingFace:
    """Methods of ``RoPE``; ``posenc.hf`` has the code, and is imported when one is called."""

    @staticmethod
    def from_hf(
        rope_parameters: Any,
        *,
        head_dim: int | None = None,
        max_position_embeddings: int | None = None,
    ) -> RoPE | NoPE | dict[str, RoPE | NoPE]:
        """The scheme that a configuration of Hugging Face transformers, 4 or 5, describes.

        Parameters
        ----------
        rope_parameters
            The dictionary ``rope_parameters``; ``{"rope_theta": ..., "rope_scaling": {...}}``; a
            whole ``config.json`` as a dictionary; a configuration of transformers
            (``model.config``); or None for a model that does not rotate.
        head_dim
            Channels per head, ``D``. A whole configuration says it.
        max_position_embeddings
            The length in the configuration, which some types need. A whole configuration says it.

        Returns
        -------
        A ``RoPE``; ``NoPE`` for None; a dictionary of them, if the configuration has one per layer
        type.

        Raises
        ------
        TypeError, ValueError
            A key is unknown or missing, or its value is wrong. The error names it.
            ``posenc.hf.read`` accepts unknown keys and lists them.
        """
        hf = import_module("posenc.hf")  # by name: the room is above this one
        found: RoPE | NoPE | dict[str, RoPE | NoPE] = hf.from_hf(
            rope_parameters, head_dim=head_dim, max_position_embeddings=max_position_embeddings
        )
        return found

    def to_hf(self) -> dict[str, Any]:
        """The dictionary ``rope_parameters`` of transformers 5. ``from_hf`` gives the scheme back.

        The layout is not in it: in transformers it belongs to the model. Nor is the length that
        ``at_length`` has set.

        Raises
        ------
        ValueError
            transformers has no ``rope_type`` for this scaling, or the frequencies are learned.
        """
        hf = import_module("posenc.hf")  # by name: the room is above this one
        parameters: dict[str, Any] = hf.to_hf(self)
        return parameters
