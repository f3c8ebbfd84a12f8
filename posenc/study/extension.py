"""Fine-tuning: a trained model is trained on as its label is tested, usually on longer sequences.

Every label of a study is fine-tuned alike, those that are tested as they were trained too. Labels
that share a training start from its very weights, and from learned arrays of position with the same
name and shape; other arrays start from their initial values. AdamW starts anew, on
``Recipe.finetuning``: as many tokens a step as training, a warm-up, a linear decay to 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from posenc.layers import LayerPlan
from posenc.study import windows
from posenc.study.checkpoints import Checkpoint
from posenc.study.decoder import Decoder
from posenc.study.recipe import Recipe
from posenc.study.schedule import learning_rate
from posenc.study.specs import Plans
from posenc.study.tasks.task import Task
from posenc.study.trainer import Trainer

_STREAM = 7  # of a seed: data and positions; windows.py and tasks/drawing.py have others
_REPORTS, _CHUNK = 10, 50  # reports at least, and steps between two of them at most
_KEPT = ("loss", "loss_same_targets", "loss_key_bytes", "loss_sliding", "scores")


def starting_point(
    recipe: Recipe, plans: Plans, label: str, seed: int, state: Mapping[str, Any]
) -> Decoder:
    """The decoder of ``plans.tested`` with the weights of a trained model.

    ``state`` has them as ``weights.<name>``, and learned arrays as ``position.<set>.<name>``.
    """
    fresh = Decoder.of(recipe, plans.tested, seed)
    position = tuple(
        {
            name: np.asarray(state[f"position.{sources[name]}.{name}"]) if name in sources else new
            for name, new in arrays.items()
        }
        for arrays, sources in zip(fresh.position, plans.inherited(label), strict=True)
    )
    return replace(fresh.with_weights_of(dict(state)), position=position)


def before(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of a label without fine-tuning, as its record keeps them."""
    return {name: scores[name] for name in _KEPT if name in scores}


def fine_tune(
    model: Trainer,
    decoder: Decoder,
    task: Task,
    seed: int,
    report: Callable[[int, float], None],
    checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:
    """Train a model that starts at ``decoder``, or at its checkpoint; what the record says of it.

    The data depend on the seed alone. Schemes are those for contexts of the length, as in an
    evaluation. ``FloatingPointError`` if a loss is not finite.
    """
    checkpoint = checkpoint or Checkpoint(None, "")
    recipe, done = decoder.recipe.finetuning(), checkpoint.resume(model)
    began = time.perf_counter() - done.seconds[-1]
    stream = int(np.random.SeedSequence([seed, _STREAM]).generate_state(1, np.uint64)[0])
    positions = windows.training_positions(
        recipe.drawn_from, seed=stream, steps=recipe.steps, length=recipe.train_tokens
    )
    chunk = min(_CHUNK, -(-recipe.steps // _REPORTS))
    while done.step < recipe.steps:
        steps = range(done.step, min(done.step + chunk, recipe.steps))
        batch = task.training(recipe, stream, steps.start, len(steps))
        rates = np.array([learning_rate(recipe, step) for step in steps])
        # Left out where a trainer without them trains alike.
        more: dict[str, Any] = {}
        if positions is not None:
            more["positions"] = positions[steps.start : steps.stop]
        if (plan := _plan(decoder.plan, recipe)) != decoder.plan:
            more["plan"] = plan
        losses = np.asarray(model.train(batch.tokens, batch.labels, rates, **more)) / math.log(2)
        if not np.isfinite(losses).all():
            wrong = steps.start + int(np.argmin(np.isfinite(losses)))
            raise FloatingPointError(
                f"fine-tuning diverged: the loss of step {wrong} is not finite"
            )
        done.add(losses, None, recipe.clip, time.perf_counter() - began)
        report(*done.curve[-1])
        if done.step < recipe.steps:
            checkpoint.keep(model, done)
    return {
        "steps": recipe.steps,
        "len": recipe.train_len,
        "batch_size": recipe.batch_size,
        "learning_rate": recipe.learning_rate,
        "weights_sha256": decoder.digest(),  # of the start
        "curve": done.curve,
        "resumed": done.resumed,
        "seconds": time.perf_counter() - began,
    }


def _plan(plan: LayerPlan, recipe: Recipe) -> LayerPlan:
    """The schemes at the length of fine-tuning; those at float positions know it already."""
    if recipe.random_float_positions:
        return plan
    tokens = recipe.train_tokens
    return LayerPlan(tuple(scheme.at_length(tokens) for scheme in plan.schemes), plan.windows)
