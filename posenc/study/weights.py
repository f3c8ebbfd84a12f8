"""Trained weights on disk: one file of safetensors for each run, read back as a decoder.

``weights.NAME`` are the arrays of ``Decoder.weights``, ``position.N.NAME`` those of
``Decoder.position[N]``, all float32. The metadata are text: ``format``, ``run`` (its digest),
``scheme``, ``seed``, ``backend``, ``posenc`` (its version), ``recipe`` (JSON) and ``sha256``.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from posenc.contract.checks import nearest
from posenc.layers import LayerPlan
from posenc.study.decoder import Decoder, Weights
from posenc.study.recipe import Recipe
from posenc.study.results import WRITING, write_whole
from posenc.study.run import Run
from posenc.study.specs import Plans
from posenc.weights.safetensors import dump_sealed, load_sealed

FOLDER = "weights"
FORMAT = "posenc.weights/1"
NAMES = r"[a-z0-9-]*-\d+-[0-9a-f]{16}\.safetensors"  # written into it
_KEPT = ("weights.", "position.")
_POSITION = re.compile(r"position\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Kept:
    """A trained model: whose run it is, and its arrays.

    Attributes
    ----------
    path
        The file.
    scheme, seed, run
        Label and seed of the run, and its digest.
    recipe
        Sizes, training and evaluation.
    weights, position
        As those of a ``Decoder``.
    """

    path: Path
    scheme: str
    seed: int
    run: str
    recipe: Recipe
    weights: Weights
    position: tuple[Weights, ...]

    def decoder(self) -> Decoder:
        """The decoder with the trained arrays: a backend's trainer takes it as any other."""
        return Decoder(self.recipe, _plan(self.scheme, self.recipe), self.weights, self.position)


def file_name(run: Run) -> str:
    """The name of a run's file: that of its record, with another suffix."""
    return str(Path(run.file_name()).with_suffix(".safetensors"))


def write(path: str | os.PathLike[str], run: Run, state: Weights) -> None:
    """Write the weights and position params of a trainer's ``state``, whole or not at all."""
    data = dump(run, state)
    with WRITING:
        write_whole(Path(path), data)


def dump(run: Run, state: Weights) -> bytes:
    """The content of the file."""
    arrays = {name: array for name, array in state.items() if name.startswith(_KEPT)}
    about = {
        "format": FORMAT,
        "run": run.digest(),
        "scheme": run.scheme,
        "seed": str(run.seed),
        "backend": run.backend,
        "posenc": run.version,
        "recipe": json.dumps(asdict(run.training())),
    }
    return dump_sealed(arrays, about)


def read(path: str | os.PathLike[str]) -> Kept:
    """The trained model in a file.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        It is no file of trained weights, or was damaged or edited.
    """
    path = Path(path)
    try:
        arrays, about = load_sealed(path.read_bytes())
        if about.get("format") != FORMAT:
            raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
        recipe = Recipe(**json.loads(about["recipe"]))
        seed, run, scheme = int(about["seed"]), about["run"], about["scheme"]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{str(path)!r} holds no weights of `posenc compare`: {error}") from error
    weights = {
        name.removeprefix("weights."): a for name, a in arrays.items() if name.startswith("weights")
    }
    sets: dict[int, Weights] = {}
    for name, array in arrays.items():
        if match := _POSITION.fullmatch(name):
            sets.setdefault(int(match[1]), {})[match[2]] = array
    owned = range(len(_plan(scheme, recipe).first_layers))
    position = tuple(sets.get(number, {}) for number in owned)
    return Kept(path, scheme, seed, run, recipe, weights, position)


def _plan(scheme: str, recipe: Recipe) -> LayerPlan:
    """The layers that were trained last: as they are tested, after fine-tuning."""
    plans = Plans.of(scheme, recipe)
    return plans.tested if recipe.finetune_steps else plans.trained


def is_kept(path: Path, digest: str) -> bool:
    """Whether the file holds the weights of the run with this digest."""
    try:
        _, about = load_sealed(path.read_bytes())
    except (OSError, ValueError):
        return False
    return about.get("run") == digest


def find(path: str | os.PathLike[str], scheme: str | None = None, seed: int | None = None) -> Kept:
    """The trained model of a scheme and seed.

    Parameters
    ----------
    path
        A file, or the folder of a study's results, or ``weights`` within it.
    scheme, seed
        Label and seed of the run; None if it is the only one.

    Raises
    ------
    FileNotFoundError
        There is no such file or folder, or the folder holds no weights.
    ValueError
        No run has this scheme and seed, or several have.
    """
    every = [read(file) for file in _files(Path(path))]
    found = [one for one in every if scheme is None or one.scheme == scheme]
    if not found:
        known = list(dict.fromkeys(one.scheme for one in every))
        raise ValueError(f"{str(path)!r} has no weights of {scheme!r}{nearest(str(scheme), known)}")
    of_seed = [one for one in found if seed is None or one.seed == seed]
    if not of_seed:
        seeds = ", ".join(map(str, sorted({one.seed for one in found})))
        raise ValueError(f"{str(path)!r} has no seed {seed} of {found[0].scheme!r}; seeds: {seeds}")
    if len(of_seed) > 1:
        raise ValueError(
            f"{str(path)!r} has {len(of_seed)} runs to choose from, by scheme, seed or file: "
            + ", ".join(f"{one.path.name} ({one.scheme}, seed {one.seed})" for one in of_seed)
        )
    return of_seed[0]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {str(path)!r}")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{str(path)!r} holds no weights; `posenc compare --keep-weights` writes them"
        )
    return files
