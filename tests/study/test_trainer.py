"""What a trainer may bring beyond a plain study: its state, norms of gradients, logits, a plan."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some

from posenc.study.decoder import Decoder
from posenc.study.recipe import Recipe
from posenc.study.specs import layers
from posenc.study.trainer import load_trainer, needs

BACKENDS = [name for name in ("jax", "torch") if require(name)]
RECIPE = Recipe(
    train_len=16, eval_lens=(16,), steps=6, batch_size=3, layers=2, dim=16, heads=2, clip=0.5
)
TOKENS = np.random.default_rng(0).integers(97, 123, size=(6, 3, 17))
RATES = np.full(6, 1e-2)

# JAX compiles each for seconds.
pytestmark = pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))


@pytest.fixture
def begin(backend):
    """A new trainer of T5 and RoPE, one learned table."""
    return lambda: load_trainer(backend)(
        Decoder.of(RECIPE, layers("t5/rope", RECIPE), seed=0), "cpu"
    )


def train(model, first, end, **others):
    steps = slice(first, end)
    return model.train(TOKENS[steps, :, :-1], TOKENS[steps, :, 1:], RATES[steps], **others)


def test_training_goes_on_from_a_state_bit_for_bit(begin):
    whole, before, after = begin(), begin(), begin()
    losses = np.concatenate([train(whole, 0, 3), train(whole, 3, 6)])
    last = whole.gradient_norms
    first = train(before, 0, 3)
    state = before.state()
    train(before, 3, 6)  # a state is a copy, which further steps leave alone
    after.load_state(state)
    assert np.array_equal(losses, np.concatenate([first, train(after, 3, 6)]))
    assert np.array_equal(last, after.gradient_norms)
    end, other = whole.state(), after.state()
    assert end.keys() == other.keys() == before.state().keys()
    assert all(np.array_equal(end[name], other[name]) for name in end)
    decoder = Decoder.of(RECIPE, layers("t5/rope", RECIPE), seed=0)
    initial = {f"weights.{name}": value for name, value in decoder.weights.items()}
    initial["position.0.table"] = decoder.position[0]["table"]
    assert initial.keys() == {name for name in end if not name.startswith("optimizer.")}
    fresh = begin().state()
    assert all(np.array_equal(fresh[name], value) for name, value in initial.items())
    assert all((end[name] != value).any() for name, value in initial.items())


def test_gradient_norms_are_those_before_clipping(begin):
    model = begin()
    assert model.gradient_norms.shape == (0,)
    train(model, 0, 1)
    assert model.gradient_norms.shape == (1,)
    assert model.gradient_norms[0] > RECIPE.clip
    # The first moments of the first step are 1 - 0.9 times the clipped gradient.
    moments = [a for name, a in model.state().items() if "exp_avg." in name or ".first." in name]
    clipped = np.sqrt(sum((np.asarray(m, float) ** 2).sum() for m in moments)) / 0.1
    assert clipped == pytest.approx(RECIPE.clip, rel=1e-4)


def test_logits_give_the_losses(begin):
    model, plan = begin(), layers("alibi/rope", RECIPE)
    tokens, labels = TOKENS[0, :, :-1], TOKENS[0, :, 1:]
    for window, other in ((5, plan), (None, None)):
        logits = model.logits(tokens, window, other)
        assert (logits.shape, logits.dtype) == ((3, 16, 256), np.float32)
        given = {} if other is None else {"plan": other}
        losses, hits = model.answers(tokens, labels, window, **given)
        picked = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        np.testing.assert_allclose(np.log(np.exp(logits).sum(-1)) - picked, losses, atol=1e-5)
        assert np.array_equal(logits.argmax(-1) == labels, hits)
    assert np.abs(logits - model.logits(tokens, 5, plan)).max() > 1e-3


def test_training_under_another_plan(begin):
    model, plan = begin(), layers("alibi/rope@3", RECIPE)
    expected = model.answers(TOKENS[0, :, :-1], TOKENS[0, :, 1:], None, plan=plan)[0].mean()
    (loss,) = train(model, 0, 1, plan=plan)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert abs(train(begin(), 0, 1)[0] - expected) > 1e-4


def test_positions_are_not_truncated(begin):
    with pytest.raises(TypeError, match=r"pos must have an integer dtype, got .*float"):
        train(begin(), 0, 1, positions=np.arange(16)[None] / 2)


def test_a_trainer_without_an_optional_part(begin):
    with pytest.raises(TypeError, match=r"^--keep-weights needs a trainer with 'state'; types\."):
        needs(SimpleNamespace(), "state", "--keep-weights")
    assert needs(begin(), "logits", "probe").__name__ == "logits"
