"""Two processes compute what one does: wrapped modules, DTensors, context parallel."""

from __future__ import annotations

import time

import pytest
from frameworks import HAS

from posenc.testing import assert_near
from posenc.testing.tolerances import ATTENTION_TOL, REDUCTION_FACTOR

if not HAS["torch"]:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this PyTorch is built without gloo", allow_module_level=True)

import two_processes
from two_processes import LEARNING, PROCESSES, SHARES, TRIED, UNEVEN, WRAPPED

# Two results, forward and back through a layer; learned numbers are in all scores of a batch.
FLOAT64 = 2 * 2 * 2 * REDUCTION_FACTOR * ATTENTION_TOL["float64"]
TIMEOUT = 120  # seconds for all, about ten of which are needed
pytestmark = pytest.mark.long

EVERY = [
    *[("wrapped", name, way) for name in LEARNING | UNEVEN for way in WRAPPED],
    *[("laid_out", name, split) for name in LEARNING for split in (False, True)],
    *[("context", name, at, several) for name in TRIED for at in SHARES for several in (0, 1)],
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of the two processes found: they start once, because that takes seconds."""
    folder = tmp_path_factory.mktemp("processes")
    started = torch.multiprocessing.spawn(
        two_processes.work, (str(folder), EVERY), nprocs=PROCESSES, join=False
    )
    end = time.monotonic() + TIMEOUT
    try:
        while not started.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                pytest.fail(f"the processes take longer than {TIMEOUT} s")
    finally:
        for process in started.processes:
            process.kill()
    return [torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(PROCESSES)]


def each(found, *key):
    """The results of the processes; an error of theirs is one here."""
    results = [one[key] for one in found]
    errors = [one for one in results if isinstance(one, str)]
    assert not errors, errors[0]
    return results


def alone(subject, documents=False):
    """Outputs and gradients of one process."""
    layer, tokens = two_processes.layer_and_tokens(subject)
    pos, seg = two_processes.where(documents)
    leaves = {name: x.requires_grad_() for name, x in tokens.items()}
    at = {"pos": pos, "seg": seg} if documents else {}
    outputs = layer(**leaves, **at)
    two_processes.objective(outputs).backward()
    gradients = {name: p.grad for name, p in layer.position.params.items()}
    return layer, outputs, gradients, {name: x.grad for name, x in leaves.items()}


def assert_alike(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, right in expected.items():
        assert (gradients[name] is None) == (right is None), name
        if right is not None:
            assert_near(gradients[name].detach(), right.detach(), FLOAT64)


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("subject", LEARNING | UNEVEN)
def test_wrapped_modules_learn_alike(found, subject, way):
    layer, outputs, gradients, _ = alone(subject)
    results = each(found, "wrapped", subject, way)
    for place, right in enumerate(outputs):
        parts = torch.cat([one["outputs"][place] for one in results])
        assert_near(parts.detach(), right.detach(), FLOAT64)
    for one in results:
        assert_alike(one["gradients"], gradients)
        assert all(torch.equal(one["params"][n], p) for n, p in layer.position.params.items())
    if way != "ddp":  # sharded indeed
        for name, p in layer.position.params.items():
            assert sum(len(one["shards"][name]) for one in results) == len(p)


@pytest.mark.parametrize("split", [False, True], ids=["replicated", "by-heads"])
@pytest.mark.parametrize("subject", LEARNING)
def test_params_and_tokens_may_be_dtensors(found, subject, split):
    _, outputs, gradients, _ = alone(subject)
    for one in each(found, "laid_out", subject, split):
        for part, right in zip(one["outputs"], outputs, strict=True):
            assert_near(part.detach(), right.detach(), FLOAT64)
        assert_alike(one["gradients"], gradients)


@pytest.mark.parametrize("several", [0, 1], ids=["one-document", "documents"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("subject", TRIED)
def test_context_parallel_equals_one_process(found, subject, share, several):
    _, outputs, gradients, own = alone(subject, documents=bool(several))
    for one in each(found, "context", subject, share, several):
        at = one["at"]
        for part, right in zip(one["outputs"], outputs, strict=True):
            assert_near(part.detach(), right[..., at, :].detach(), FLOAT64)
        assert_alike(one["gradients"], gradients)
        assert_alike(one["own"], {name: grad[..., at, :] for name, grad in own.items()})
