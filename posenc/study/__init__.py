"""The study behind ``posenc compare``: train short, test long, everything equal but the scheme.

``Study`` is the configuration, ``run_study`` carries it out, and each ``Run`` is one scheme with
one seed. A backend brings a ``Trainer``. It trains the ``Decoder`` that it is given with AdamW and
the ``learning_rate`` of each step. ``probe`` measures models that exist.
"""

from typing import TYPE_CHECKING, Any

from posenc.study.decoder import NORM_EPSILON, Decoder, Layers, embedding_scale, has_weight_decay
from posenc.study.recipe import Recipe
from posenc.study.run import Run
from posenc.study.runner import run_study
from posenc.study.schedule import ADAM_EPSILON, BETAS, learning_rate
from posenc.study.study import Study
from posenc.study.tasks.task import NO_ANSWER, Examples, Task
from posenc.study.trainer import Trainer

if TYPE_CHECKING:
    from posenc.probe import probe

__all__ = [
    "ADAM_EPSILON",
    "BETAS",
    "NORM_EPSILON",
    "NO_ANSWER",
    "Decoder",
    "Examples",
    "Layers",
    "Recipe",
    "Run",
    "Study",
    "Task",
    "Trainer",
    "embedding_scale",
    "has_weight_decay",
    "learning_rate",
    "probe",
    "run_study",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """``probe``, which builds on the files of a study, and so is imported after them."""
        if name != "probe":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from posenc.probe import probe

        return probe
