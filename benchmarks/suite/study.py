"""Training as ``posenc compare`` does it, in this process."""

from __future__ import annotations

import numpy as np

from posenc.study.decoder import Decoder
from posenc.study.recipe import Recipe
from posenc.study.schedule import learning_rate
from posenc.study.specs import Plans
from posenc.study.trainer import backends, load_trainer
from suite import GRID, PLAIN, SOME, Timed, warm

_STEPS = 4


class Training(Timed):
    """4 steps of 16 sequences of 64 tokens with the study's default decoder.

    4096 divided by the seconds are the tokens per second that ``posenc compare`` prints.
    """

    param_names = ("scheme", "backend")
    params = (
        SOME if GRID == "full" else PLAIN,
        [name for name, installed in backends().items() if installed],
    )

    @warm
    def setup(self, name, backend):
        recipe = Recipe()
        decoder = Decoder.of(recipe, Plans.of(name, recipe).trained, seed=0)
        shape = _STEPS, recipe.batch_size, recipe.train_len + 1
        tokens = np.random.default_rng(0).integers(recipe.of_task.vocabulary, size=shape)
        self.batch = tokens[..., :-1], tokens[..., 1:]
        self.rates = np.array([learning_rate(recipe, step) for step in range(_STEPS)])
        self.trainer = load_trainer(backend)(decoder, "cpu")

    def time_4096_tokens(self, *_):
        self.trainer.train(*self.batch, self.rates)
