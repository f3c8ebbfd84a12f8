"""The study behind ``posenc compare``: train short, test long, everything equal but the scheme.

``Study`` is the configuration, ``run_study`` carries it out, and each ``Run`` is one scheme with
one seed. A backend brings a ``Trainer``. It trains the ``Decoder`` that it is given, or a model of
one's own, with AdamW and the ``learning_rate`` of each step.

From Python: ``compare(study)`` does what the command does, and ``write_results(study, records)``
writes the table, the figures and the report of ``list(run_study(study, study.corpus()))``.
``probe`` measures models that exist.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what ``_HOMES`` says, for a type checker
    from posenc.probe import probe
    from posenc.study.decoder import (
        NORM_EPSILON,
        Decoder,
        Layers,
        embedding_scale,
        has_weight_decay,
    )
    from posenc.study.models import check_model, load_model
    from posenc.study.recipe import Recipe
    from posenc.study.run import Run
    from posenc.study.runner import run_study
    from posenc.study.schedule import ADAM_EPSILON, BETAS, learning_rate
    from posenc.study.study import Study
    from posenc.study.tasks.task import NO_ANSWER, Examples, Task
    from posenc.study.terminal import compare, write_results
    from posenc.study.trackers import Tracker
    from posenc.study.trainer import Trainer

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
    "Tracker",
    "Trainer",
    "check_model",
    "compare",
    "embedding_scale",
    "has_weight_decay",
    "learning_rate",
    "load_model",
    "probe",
    "run_study",
    "write_results",
]

# Imported when they are asked for: the list of schemes needs tasks alone, and help nothing.
_HOMES = {
    "posenc.probe": ("probe",),
    "posenc.study.decoder": (
        "NORM_EPSILON", "Decoder", "Layers", "embedding_scale", "has_weight_decay",
    ),
    "posenc.study.models": ("check_model", "load_model"),
    "posenc.study.recipe": ("Recipe",),
    "posenc.study.run": ("Run",),
    "posenc.study.runner": ("run_study",),
    "posenc.study.schedule": ("ADAM_EPSILON", "BETAS", "learning_rate"),
    "posenc.study.study": ("Study",),
    "posenc.study.tasks.task": ("NO_ANSWER", "Examples", "Task"),
    "posenc.study.terminal": ("compare", "write_results"),
    "posenc.study.trackers": ("Tracker",),
    "posenc.study.trainer": ("Trainer",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return found
