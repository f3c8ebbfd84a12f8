"""The one runner of the benchmarks: the same numbers on every framework, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness import clock
from harness.run import FORWARD, STEP, load, named, params_of

FRAMEWORKS = ["numpy", "torch", "jax"]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {"x": X, "at": np.arange(3), **named({"scale": np.float32([1, 2, 3])})}


def runner_of(name):
    if not require(name):
        pytest.skip(f"{name} is not installed")
    return load(name)


def scaled(arrays):
    return arrays["x"] * params_of(arrays)["scale"] + arrays["at"]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_forward_pass(name):
    runner = runner_of(name)
    ready = runner.ready(scaled, ARRAYS, FORWARD)
    (out,), gradients = ready.answers()
    np.testing.assert_array_equal(runner.host(out), X * [1, 2, 3] + np.arange(3))
    assert gradients == {}
    assert ready.peak_memory() >= X.nbytes


@pytest.mark.parametrize("name", FRAMEWORKS[1:])
def test_a_step_has_the_gradients_that_are_asked_for(name):
    runner = runner_of(name)
    ones = {"d_out": lambda shapes: [np.ones(shape, np.float32) for shape in shapes]}
    step = runner.ready(scaled, ARRAYS, STEP, **ones)
    _, gradients = step.answers()
    assert step.kind == STEP
    assert gradients.keys() == {"x", "params.scale"}  # positions are integers
    np.testing.assert_array_equal(runner.host(gradients["params.scale"]), X.sum(axis=0))
    np.testing.assert_array_equal(runner.host(gradients["x"]), np.tile([1, 2, 3], (2, 1)))
    some = runner.ready(scaled, ARRAYS, STEP, learned=["x"], **ones)
    assert some.answers()[1].keys() == {"x"}
    ms, _ = step.first()
    assert ms > 0
    assert {"step", "host of step"} <= step.sample().keys()


@pytest.mark.parametrize("name", FRAMEWORKS[1:])
def test_steps_without_given_gradients_get_the_same_numbers(name):
    runner, other = runner_of(name), load("numpy")
    _, gradients = runner.ready(scaled, ARRAYS, STEP).answers()
    drawn = np.random.default_rng(2).standard_normal(X.shape, np.float32)
    expected = other.host(drawn) * [1, 2, 3]
    np.testing.assert_allclose(runner.host(gradients["x"]), expected, rtol=1e-6)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_has_no_gradients_is_refused(name):
    runner = runner_of(name)
    with pytest.raises(NotImplementedError, match=r"has no gradients|does not depend on floating"):
        runner.ready(lambda arrays: arrays["at"], {"at": np.arange(3)}, STEP)


@pytest.mark.parametrize("name", FRAMEWORKS[1:])
def test_numbers_come_from_the_seed(name):
    runner = runner_of(name)
    first, again, other = (runner.host(runner.tokens(seed, (1, 2, 5, 3))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == runner.layout(np.zeros((1, 2, 5, 3))).shape


def test_a_speed_is_read_as_it_was_written():
    speed = clock.Speed.of([1.0, 2.0, 4.0])
    assert (speed.median, speed.n) == (2.0, 3)
    assert clock.Speed.read(speed.json()) == speed


def test_short_calls_are_repeated_and_take_turns():
    now, seen = [0.0], []

    def takes(name, seconds):
        def call():
            now[0] += seconds
            seen.append(name)

        return call

    calls = {"short": takes("short", 1e-3), "long": takes("long", 8e-3)}
    taken = clock.take_turns(calls, (3, 3), shortest=4e-3, now=lambda: now[0])
    assert {name: np.round(samples, 6).tolist() for name, samples in taken.items()} == {
        "short": [1.0] * 3, "long": [8.0] * 3,
    }  # fmt: skip
    assert seen[2:].count("short") == 4 * seen[2:].count("long") == 12
