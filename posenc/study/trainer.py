"""What a backend brings to a study, and which backends are installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from posenc.contract.checks import nearest
from posenc.layers import LayerPlan
from posenc.study.decoder import Decoder, Weights
from posenc.study.identity import TRAINERS
from posenc.study.tasks.examples import Integers


class Trainer(Protocol):
    """Trains and scores one decoder in one framework.

    A module registers its class in the entry-point group ``posenc.trainers``, under the name of
    the framework that it needs.

    A plain study needs ``train`` without ``plan``, ``answers`` and ``versions``. All else is
    optional: a trainer may leave it out, and an option that needs it says so (``needs``).

    Attributes
    ----------
    computes
        Optional: names of the recipe's options ``dtype``, ``accumulate`` and ``compile`` that the
        trainer follows; of others, only the plain value is accepted.
    gradient_norms
        Optional: the norms before clipping ``(n,)`` of the steps of the last ``train``.
    """

    computes: tuple[str, ...]
    gradient_norms: Integers

    def __init__(self, decoder: Decoder, device: str, scratch: Path | None = None) -> None:
        """``scratch`` is a folder for compiled programs, shared by the processes of a study."""
        ...

    def train(
        self,
        tokens: Integers,
        labels: Integers,
        rates: Integers,
        positions: Integers | None = None,
        plan: LayerPlan | None = None,
    ) -> Integers:
        """Take one step per batch of ``tokens (n, batch_size, T)`` with its learning rate.

        Returns the mean losses ``(n,)`` in nats of the answers: of ``labels``, shaped as
        ``tokens``, those that are not ``NO_ANSWER``. Schemes and windows are those of
        ``decoder.layers(plan)``; ``plan`` is left out where they are those of the decoder.
        ``positions (n, T)`` are those of the tokens, for all sequences of a step; None, or left
        out, for 0, 1, 2, ... Floats are passed on as they are: the schemes of posenc refuse them
        and take fractions as integers (``posenc.positions.fractional``).
        """
        ...

    def answers(
        self, tokens: Integers, labels: Integers, window: int | None, plan: LayerPlan | None = None
    ) -> tuple[Integers, Integers]:
        """Losses in nats of ``labels (N, T)``, and whether the likeliest token is the label.

        Both are ``(N, T)``, with any value where there is no answer. Schemes and windows are those
        of ``decoder.layers(plan, length=T, window=window)``; ``plan`` is left out where the model
        is tested as it is trained.
        """
        ...

    def logits(
        self, tokens: Integers, window: int | None = None, plan: LayerPlan | None = None
    ) -> Integers:
        """Optional: the logits ``(N, T, V)`` of ``tokens (N, T)``, schemes as in ``answers``."""
        ...

    def state(self) -> Weights:
        """Optional: copies of all arrays that training goes on from.

        ``weights.NAME`` are those of ``Decoder.weights``, ``position.N.NAME`` those of
        ``Decoder.position[N]``; ``optimizer.*`` are the trainer's own. float32, float64 or int64.
        """
        ...

    def load_state(self, state: Weights) -> None:
        """Optional: go on from a ``state`` of the same decoder, bit for bit as if never stopped."""
        ...

    @staticmethod
    def device_memory() -> int:
        """Optional: the most bytes of the accelerator so far; 0 if there is none."""
        ...

    def versions(self) -> dict[str, str]:
        """The framework's version and the device's name."""
        ...


def needs(trainer: Trainer, name: str, option: str) -> Any:
    """An optional attribute of a trainer.

    Raises
    ------
    TypeError
        The trainer has none, which ``option`` needs.
    """
    if not hasattr(trainer, name):
        kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
        raise TypeError(f"{option} needs a trainer with {name!r}; {kind} has none")
    return getattr(trainer, name)


def backends() -> dict[str, bool]:
    """Names of the known backends, and whether the framework of each is installed."""
    names = sorted({entry.name for entry in entry_points(group=TRAINERS)})
    return {name: find_spec(name) is not None for name in names}


def choose_backend(name: str) -> str:
    """Resolve ``"auto"`` to the first installed backend, and check any other name.

    Raises
    ------
    ValueError
        No backend has this name.
    RuntimeError
        The backend, or any, is not installed.
    """
    known = backends()
    if name == "auto":
        installed = [n for n, is_installed in known.items() if is_installed]
        if not installed:
            raise RuntimeError(
                f"no backend is installed; pip install one of: {', '.join(known) or 'none known'}"
            )
        return installed[0]
    if name not in known:
        raise ValueError(f"unknown backend {name!r}{nearest(name, ['auto', *known])}")
    if not known[name]:
        raise RuntimeError(f"backend {name!r} is not installed: {_install(name)}")
    return name


def _install(name: str) -> str:
    """How to install a backend."""
    advice = f"pip install 'posenc[{name}]'"
    if name == "torch":
        advice += (
            "; without a GPU, first torch from PyTorch's CPU index, or pip downloads gigabytes"
        )
    return advice


def load_trainer(backend: str) -> type[Trainer]:
    """The backend's class; its module, and so its framework, is imported here."""
    entry = next(iter(entry_points(group=TRAINERS, name=backend)))
    trainer: type[Trainer] = entry.load()
    return trainer
