"""Learned arrays of a scheme that the caller gives to a model: ``model.posenc``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc_torch.position import Positions

NAME = "posenc"  # of the module, and so the first word of its arrays in a checkpoint
RECORD = "posenc_arrays"  # of the configuration: which arrays a model was saved with
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Learned(Positions):
    """``Positions`` that are called, so that a wrapper of the module may answer with its copy.

    PEFT's ``modules_to_save=["posenc"]`` puts such a wrapper in its place.
    """

    def forward(self, layer: int | None, hidden: Any = None, places: Any = None) -> Any:
        """The arrays of a layer; for None, ``hidden`` with the embeddings of ``places``."""
        if any(array.is_meta for array in self.parameters()):
            raise NotImplementedError(
                f"model.{NAME} has no values: it is offloaded, which is served for the other "
                "modules of a model alone"
            )
        return self.embed(hidden, places) if layer is None else dict(self[layer].params)


def params_of(model: nn.Module, layer: int) -> Callable[[], Mapping[str, Tensor]]:
    """A function that returns the present arrays of a layer of a model."""
    return functools.partial(_call, model, layer)


def embed_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that adds the embeddings of a model's schemes."""
    return functools.partial(_call, model, None)


def _call(model: nn.Module, *arguments: Any) -> Any:
    return getattr(model, NAME)(*arguments)


def saved_arrays(model: Any) -> tuple[Path, dict[str, Tensor]] | None:
    """The folder from which a model was loaded, and the arrays of ``model.posenc`` in it."""
    name = str(getattr(model, "name_or_path", "") or "")
    folder = Path(name)
    if not name or not folder.is_dir():
        return None
    if (folder / _INDEX).is_file():
        files = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    elif (folder / _WHOLE).is_file():
        files = {}
        with _opened(folder / _WHOLE) as stored:
            files = dict.fromkeys(stored.keys(), _WHOLE)
    else:
        return None
    own = {key: file for key, file in files.items() if key.startswith(f"{NAME}.")}
    found = {}
    for key, file in own.items():
        with _opened(folder / file) as stored:
            found[key.removeprefix(f"{NAME}.")] = stored.get_tensor(key)
    return (folder, found) if found else None


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(path), framework="pt")


@torch.no_grad()
def take_saved(learned: Positions, model: Any) -> None:
    """Copy the arrays that were saved with a model, if the scheme has arrays and it has any.

    A model to which a scheme with the same arrays was applied before keeps their present values.

    Raises
    ------
    ValueError
        They are of another scheme: other names or shapes. Or the configuration says that there are
        arrays, and no folder has them.
    """
    own = dict(learned.named_parameters())
    need = {name: tuple(array.shape) for name, array in own.items()}
    earlier = dict(model.posenc.named_parameters()) if hasattr(model, NAME) else None
    if earlier is not None:
        if {name: tuple(array.shape) for name, array in earlier.items()} == need:
            for name, array in earlier.items():
                own[name].copy_(array)
        return
    saved = saved_arrays(model) if own else None
    if saved is None:
        recorded = getattr(model.config, RECORD, None)
        if own and recorded:
            raise ValueError(
                f"model was saved with learned arrays {sorted(recorded)}, and they are not in a "
                f"local folder {str(getattr(model, 'name_or_path', '') or '')!r} with "
                f"{_WHOLE}: load the model from such a folder, or give fresh=True for first values"
            )
        return
    folder, arrays = saved
    have = {name: tuple(array.shape) for name, array in arrays.items()}
    if have != need:
        raise ValueError(
            f"scheme has the learned arrays {need}, and the folder of the model, {str(folder)!r}, "
            f"holds {have}: give the scheme that was saved, or fresh=True for first values"
        )
    for name, array in arrays.items():
        own[name].copy_(array)
