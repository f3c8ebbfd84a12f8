"""The study: everything but the scheme is equal, and finished runs are kept."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from frameworks_installed import require
from sample import long, some

import posenc
from posenc.cli.list import one_of_each_kind
from posenc.contract.protocol import Hook
from posenc.layers import LayerPlan
from posenc.presets import PLANS
from posenc.schemes import Sum
from posenc.study import identity, runner, windows
from posenc.study import results as results_module
from posenc.study import run as runs
from posenc.study.corpus import Corpus
from posenc.study.decoder import NORM_EPSILON, Decoder
from posenc.study.outputs import STUDY, publish
from posenc.study.recipe import Recipe
from posenc.study.results import (
    COLUMNS,
    load,
    partial_path,
    save,
    seconds,
    sweep,
    write_tables,
    write_whole,
)
from posenc.study.runner import compute, plan, run_study, runs_folder, work
from posenc.study.schedule import learning_rate
from posenc.study.source import _imports, _package, source_digest
from posenc.study.specs import Plans, fitted_settings, layers, parse, sides, split
from posenc.study.study import Study
from posenc.study.terminal import write_all
from posenc.study.trainer import choose_backend

BACKENDS = [name for name in ("jax", "torch") if require(name)]
CATALOGUE = sorted(posenc.catalogue())
# Enough to train: a trainer asks little of a scheme.
TRAINED = ["alibi", "learned", "nope", "rope", "sinusoidal", "t5"]
# JAX compiles each for seconds.
several_backends = pytest.mark.parametrize("backend", some(BACKENDS, BACKENDS[-1:], long))
SMALL = {
    "train_len": 16,
    "steps": 4,
    "batch_size": 3,
    "layers": 2,
    "dim": 16,
    "heads": 2,
    "eval_windows": 3,
    "eval_lens": (16, 32),
    "warmup": 1,
}
# Relative difference of two float32 programs that sum in different orders, after a few steps.
TRAJECTORY = 2e-5


@dataclass(frozen=True)
class Growing(posenc.PositionScheme):
    """Uses ``at_length``: the penalty of distance depends on the length of the context."""

    slope: float = 1.0

    def constants(self):
        return {"slope": (self.slope,)}

    def bias(self, q, k, *, params, xp):
        return -params["slope"] * xp.astype(xp.abs(q - k), params["slope"].dtype)

    def at_length(self, length):
        return replace(self, slope=self.slope * 16 / max(16, length))


@dataclass(frozen=True)
class Gated(posenc.PositionScheme):
    """A feature of hidden states: a learned gate per token and head, summed over positions."""

    num_heads: int
    dim: int

    def param_specs(self):
        return {"w": posenc.ParamSpec((self.num_heads, self.dim))}

    def feature_specs(self):
        return {"gates": posenc.FeatureSpec(self.gates, of="key", cumulative=True)}

    def gates(self, x, *, params, xp):
        gates = -xp.log1p(xp.exp(xp.matmul(x, xp.matrix_transpose(params["w"]))))
        return xp.matrix_transpose(gates)

    def bias(self, q, k, *, params, xp):
        return params.query["gates"] - params.key["gates"]


@dataclass(frozen=True)
class Short(posenc.PositionScheme):
    """Fails if a context is longer than in training."""

    def at_length(self, length):
        return {16: self}[length]


@pytest.fixture
def corpus():
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, size=n).tolist()) for n in (2, 3, 4, 5, 7)]
    text = b" ".join(words[i] for i in rng.integers(0, len(words), size=4000))
    return Corpus("words", text[:-4000], text[-4000:], 1, 1, "0" * 64)


def recipe(**changes):
    return Recipe(**{**SMALL, **changes})


def trainer(backend, schemes, seed=0, **changes):
    made = recipe(**changes)
    study = Study(**asdict(made), schemes=("nope",))
    run = study.runs(Corpus("", b"", b"", 0, 0, ""), backend)[0]
    plan = schemes if isinstance(schemes, LayerPlan) else LayerPlan(schemes)
    decoder = Decoder.of(made, plan, seed)
    return runs.make_trainer(run, decoder), decoder


def batches(corpus, steps=4):
    starts = windows.training_starts(corpus.train, seed=0, steps=steps, batch_size=3, length=16)
    return windows.cut(corpus.train, starts, 16)


def train(model, tokens, made, *positions):
    """Losses of steps on windows of text, at the rates of a recipe."""
    rates = np.array([learning_rate(made, step) for step in range(len(tokens))])
    return model.train(tokens[..., :-1], tokens[..., 1:], rates, *positions)


def token_losses(model, tokens, window, *plan):
    """Losses of the next bytes of ``tokens``."""
    return model.answers(tokens[:, :-1], tokens[:, 1:], window, *plan)[0]


def study(tmp_path, **changes):
    small = {**SMALL, "schemes": ("alibi", "rope"), "seeds": 1, "backend": BACKENDS[-1]}
    return Study(**{**small, "out": str(tmp_path / "out"), **changes})


@pytest.fixture
def records(tmp_path, corpus, monkeypatch):
    """Runs a study in threads, on the small corpus."""
    monkeypatch.setattr("posenc.study.runner.read_corpus", lambda text: corpus)

    def run(one):
        with ThreadPoolExecutor(1) as pool:
            return list(run_study(one, corpus, executor=pool))

    return run


@pytest.mark.parametrize("name", CATALOGUE)
def test_shared_weights_are_the_same_for_every_scheme(name):
    one = Decoder.of(recipe(), layers(name, recipe()), seed=3)
    other = Decoder.of(recipe(), LayerPlan.of(posenc.NoPE(), 2), seed=3)
    assert one.digest() == other.digest() != Decoder.of(recipe(), one.plan, seed=4).digest()


@pytest.mark.parametrize("name", CATALOGUE)
def test_exactly_the_params_of_one_scheme_are_there(name):
    decoder = Decoder.of(recipe(), layers(name, recipe()), seed=0)
    scheme = decoder.schemes[0]
    declared = sum(math.prod(spec.shape) for spec in scheme.param_specs().values())
    once = scheme.shared or Hook.EMBEDDING in scheme.hooks()
    assert decoder.sizes()["position"] == declared * (1 if once else 2)


def test_a_seed_decides_the_data_and_the_scheme_does_not(corpus):
    keywords = {"steps": 5, "batch_size": 3, "length": 16}
    one, same, other = (
        windows.training_starts(corpus.train, seed=seed, **keywords) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_windows_never_leave_the_text(corpus):
    data = corpus.train[:20]
    starts = windows.training_starts(data, seed=0, steps=100, batch_size=8, length=16)
    assert starts.min() == 0
    assert starts.max() == 3
    assert windows.cut(data, starts, 16).shape == (100, 8, 17)


def test_every_length_scores_the_same_bytes(corpus):
    stretches = windows.held_out_stretches(corpus.validation, count=3, longest=64)
    whole = np.sort(stretches[:, 1:].ravel())
    for length in (1, 16, 64):
        pieces = windows.non_overlapping(stretches, length)
        assert np.array_equal(np.sort(pieces[:, 1:].ravel()), whole)
    for length in (16, 64):
        ends = windows.same_targets(stretches, length)
        assert np.array_equal(ends[:, -8:], stretches[:, -8:])


def test_warm_up_then_linear_decay():
    one = recipe(steps=100, warmup=10, learning_rate=1.0)
    assert [learning_rate(one, step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate(one, 99) == pytest.approx(1 / 90)


@long
@pytest.mark.skipif(len(BACKENDS) < 2, reason="compares two frameworks")
@pytest.mark.parametrize(
    "name",
    some([*TRAINED, "rope+alibi", "rope@9/t5@5", "t5@9/t5"], ["rope@9/t5@5"], long),
)
def test_both_trainers_follow_the_same_trajectory(name, corpus):
    losses, scores = [], []
    for backend in BACKENDS:
        model, _ = trainer(backend, layers(name, recipe()))
        losses.append(train(model, batches(corpus), recipe()))
        stretches = windows.held_out_stretches(corpus.validation, count=3, longest=32)
        scores.append(np.stack([token_losses(model, stretches, window) for window in (None, 7)]))
    np.testing.assert_allclose(*losses, rtol=TRAJECTORY)
    np.testing.assert_allclose(*scores, rtol=1e-3, atol=1e-3)
    assert losses[0][-1] < losses[0][0]


@several_backends
@pytest.mark.parametrize("scheme", [Growing(), Gated(2, 16)], ids=["at_length", "gate"])
def test_a_scheme_from_outside_trains(backend, scheme, corpus):
    model, decoder = trainer(backend, (scheme,) * 2)
    before = token_losses(model, batches(corpus)[0], None)
    assert np.isfinite(train(model, batches(corpus), recipe())).all()
    assert decoder.sizes()["position"] == 2 * 2 * 16 * isinstance(scheme, Gated)
    assert np.abs(token_losses(model, batches(corpus)[0], None) - before).max() > 0


@several_backends
def test_evaluation_takes_the_scheme_for_its_length(backend, corpus):
    tokens = windows.held_out_stretches(corpus.validation, count=2, longest=64)
    (growing, _), (fixed, _) = (
        trainer(backend, (scheme,) * 2) for scheme in (Growing(), Growing(slope=0.25))
    )
    at_64, same = token_losses(growing, tokens, None), token_losses(fixed, tokens, None)
    assert np.abs(at_64 - same).max() > 1e-3  # slope 1/4 is then divided by 4 once more
    short, other = (token_losses(model, tokens[:, :17], None) for model in (growing, fixed))
    assert np.abs(short - other).max() > 1e-3


@several_backends
@pytest.mark.parametrize("name", TRAINED)
def test_no_byte_is_predicted_from_later_ones(backend, name, corpus):
    model, _ = trainer(backend, layers(name, recipe()))
    tokens = windows.held_out_stretches(corpus.validation, count=2, longest=32)
    changed = tokens.copy()
    changed[:, 20:] ^= 1
    one, other = (token_losses(model, t, None) for t in (tokens, changed))
    np.testing.assert_allclose(one[:, :19], other[:, :19], atol=1e-5)
    assert np.abs(one[:, 19:] - other[:, 19:]).max() > 1e-2


@several_backends
def test_a_window_of_the_whole_length_changes_nothing(backend, corpus):
    model, _ = trainer(backend, layers("rope", recipe()))
    tokens = windows.held_out_stretches(corpus.validation, count=2, longest=32)
    plain, whole, narrow = (token_losses(model, tokens, window) for window in (None, 32, 4))
    np.testing.assert_allclose(plain, whole, atol=1e-5)
    assert np.abs(plain - narrow).max() > 1e-3


def losses_by_hand(decoder, tokens, windows, schemes=None, pos=None):
    """The losses of a study's decoder in NumPy, layer by layer, each in its window."""
    schemes = decoder.schemes if schemes is None else schemes
    w, dim = decoder.weights, decoder.recipe.dim

    def norm(x, gain):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + NORM_EPSILON) * gain

    x = w["embed"][tokens[:, :-1]] * math.sqrt(dim)
    for layer, window in enumerate(windows):
        hidden = norm(x, w[f"{layer}.norm1"])
        heads = (hidden @ w[f"{layer}.qkv"]).reshape(*x.shape[:2], 3, decoder.recipe.heads, -1)
        q, k, v = np.transpose(heads, (2, 0, 3, 1, 4))
        arrays = decoder.position[decoder.owners[layer]]
        params = {name: arrays[name] for name in schemes[layer].param_specs()}
        at = {"causal": True, "window": window, "tokens": posenc.Tokens(pos=pos)}
        out = posenc.attention(q, k, v, schemes[layer], params, **at)
        x = x + np.swapaxes(out, 1, 2).reshape(x.shape) @ w[f"{layer}.out"]
        up = norm(x, w[f"{layer}.norm2"]) @ w[f"{layer}.up"]
        gelu = up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2
        x = x + gelu @ w[f"{layer}.down"]
    logits = norm(x, w["norm"]) @ w["embed"].T
    logits = logits - logits.max(-1, keepdims=True)
    picked = np.take_along_axis(logits, tokens[:, 1:, None].astype(np.int64), -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - picked


@several_backends
@pytest.mark.parametrize(
    "label", some(["rope@5/rope", "rope/t5@3", "t5@20/t5@4", "alibi@9"], ["rope@5/rope"], long)
)
def test_each_layer_attends_in_its_window(backend, label, corpus):
    model, decoder = trainer(backend, layers(label, recipe()))
    tokens = windows.held_out_stretches(corpus.validation, count=2, longest=32)
    own = decoder.plan.windows
    assert own != (None, None)
    losses = token_losses(model, tokens, None)
    np.testing.assert_allclose(losses, losses_by_hand(decoder, tokens, own), atol=1e-4)
    assert np.abs(losses - losses_by_hand(decoder, tokens, (None, None))).max() > 1e-2
    # A window of the evaluation narrows the layers' windows and widens none.
    narrower = [min(window or 7, 7) for window in own]
    losses = token_losses(model, tokens, 7)
    np.testing.assert_allclose(losses, losses_by_hand(decoder, tokens, narrower), atol=1e-4)
    # Training uses the same windows: its first loss is that of the initial weights.
    (batch,) = batches(corpus, 1)
    expected = losses_by_hand(decoder, batch, own).mean()
    assert train(model, batch[None], recipe())[0] == pytest.approx(expected, abs=1e-5)
    assert abs(losses_by_hand(decoder, batch, (None, None)).mean() - expected) > 1e-4


def test_windows_are_part_of_the_digest_of_a_run(tmp_path, corpus, records):
    labels = ("rope@9/nope", "rope/nope", "rope@9")
    one = study(tmp_path, schemes=labels, windowed=labels[2:], backend=BACKENDS[-1])
    ended = {record["scheme"]: record for record in records(one)}
    assert [r["error"] for r in ended.values()] == [None] * 3
    assert [r["windows"] for r in ended.values()] == [[9, None], [None, None], [9, 9]]
    losses = [r["loss"]["32"] for r in ended.values()]
    assert len(set(losses)) == 3
    assert ended["rope@9"]["loss_windowed"] == ended["rope@9"]["loss"]  # 16 is wider
    assert plan(one, corpus)[1] == []  # all are kept
    run = one.runs(corpus, BACKENDS[-1])[0]
    other = replace(run, windows=(8, None))
    assert other.digest() != run.digest()
    with pytest.raises(RuntimeError, match=r"windows changed .*: from 8, None to 9, None"):
        list(runs.carry_out([other], corpus))


@several_backends
def test_records_are_complete_and_the_same_again(tmp_path, records, backend):
    first = records(study(tmp_path, windowed=("rope",), backend=backend))
    again = records(study(tmp_path / "other", windowed=("rope",), backend=backend))
    assert [r["status"] for r in first] == ["ok", "ok"], first
    for one, other in zip(first, again, strict=True):
        for key in ("loss", "loss_same_targets", "loss_windowed", "curve", "weights_sha256"):
            assert one[key] == other[key]
        assert set(one["loss"]) == {"16", "32"}
        assert one["loss"]["32"] == pytest.approx(np.mean(one["loss_by_position"]["loss"]))
    alibi, rope = first
    assert alibi["loss_windowed"] is None
    assert rope["loss_windowed"]["16"] == pytest.approx(rope["loss"]["16"], abs=1e-5)
    json.dumps(first, allow_nan=False)


def test_only_missing_runs_are_computed(tmp_path, corpus, records):
    one = study(tmp_path)
    records(one)
    kept, missing = plan(one, corpus)
    assert (len(kept), len(missing)) == (2, 0)
    assert plan(study(tmp_path, steps=5), corpus)[0] == []
    assert len(plan(study(tmp_path, seeds=2), corpus)[1]) == 2


def edit_loss(path, other):
    record = json.loads(path.read_text())
    record["loss"]["16"] /= 2
    path.write_text(json.dumps(record))


DAMAGE = {
    "cut short": lambda path, other: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path, other: path.write_bytes(b""),
    "no text": lambda path, other: path.write_bytes(b"\xff\xfe\0"),
    "too deep": lambda path, other: path.write_bytes(b"[" * 100_000),
    "a list": lambda path, other: path.write_bytes(b"[1, 2]"),
    "a number edited": edit_loss,
    "another run's": lambda path, other: path.write_bytes(other.read_bytes()),
    "a folder": lambda path, other: (path.unlink(), path.mkdir()),
}


def test_a_damaged_record_is_computed_again(tmp_path, corpus, records):
    one = study(tmp_path)
    before = {record["scheme"]: record for record in records(one)}
    path, other = (next(runs_folder(one).glob(f"{n}-*.json")) for n in ("alibi", "rope"))
    whole = path.read_bytes()
    for kind, damage in DAMAGE.items():
        damage(path, other)
        kept, missing = plan(one, corpus)
        assert [r["scheme"] for r in kept] == ["rope"], kind
        assert [c.scheme for c in missing] == ["alibi"], kind
        if kind != "a folder":
            path.write_bytes(whole)
            assert plan(one, corpus)[1] == []
    with pytest.warns(UserWarning, match="cannot keep"):  # nothing can take a folder's place
        rope, alibi = records(one)
    assert (rope["scheme"], alibi["loss"]) == ("rope", before["alibi"]["loss"])


def test_the_worst_names_are_names_of_files(tmp_path, corpus):
    label = "/".join(["rope:base=500000,layout=half@512", "alibi"] * 10)
    many = study(tmp_path, schemes=(label, f"{label}/nope"), layers=21)
    names = [run.file_name() for run in many.runs(corpus, BACKENDS[0])]
    assert len(set(names)) == 2
    assert (
        max(len(f".{name}.0f0f0f0f-4194304-0f0f0f0f.partial") for name in names) < 144
    )  # eCryptfs


class Immediate(Executor):
    """Runs a job at once; ``end`` then decides how its future ends."""

    def __init__(self, end, folder=None):
        self.end, self.folder = end, folder

    def submit(self, function, /, *arguments):
        future = Future()
        if function is work:
            run, text, folder, *others = arguments
            arguments = (run, text, str(self.folder or folder), *others)
        self.end(future, function(*arguments))
        return future


@pytest.mark.parametrize(
    "executor",
    [
        Immediate(lambda future, result: future.set_exception(RuntimeError("killed"))),
        Immediate(Future.set_result, Path("/folder/of/another/machine")),
    ],
    ids=["dies afterwards", "another disk"],
)
def test_finished_training_is_kept(tmp_path, corpus, monkeypatch, executor):
    monkeypatch.setattr("posenc.study.runner.read_corpus", lambda text: corpus)
    one = study(tmp_path, schemes=("nope",))
    (record,) = compute(one, plan(one, corpus)[1], executor=executor)
    assert record["status"] == "ok", record["error"]
    assert [r["loss"] for r in plan(one, corpus)[0]] == [record["loss"]]


def test_a_problem_of_every_run_is_one_error(tmp_path, corpus):
    one = study(tmp_path, device="nosuch")
    with pytest.raises(RuntimeError, match="cannot train on device 'nosuch'"):
        list(compute(one, plan(one, corpus)[1], executor=Immediate(Future.set_result)))


def digests(tmp_path, corpus, label="made.mine"):
    return {run.digest() for run in study(tmp_path, schemes=(label,)).runs(corpus, BACKENDS[0])}


MAKER = """\
from dataclasses import dataclass
import numpy as np, posenc
def mine(*, head_dim, **sizes):
    return posenc.RoPE(head_dim=head_dim, base=5.0)
@dataclass(frozen=True)
class Held(posenc.PositionScheme):
    table: object
    rule: object
def held(**sizes):
    table, power = np.zeros(5000), 2
    return Held(table, lambda x: x ** power if x in {"a", "b", "c"} else [x for _ in {power}])
"""
EDITS = [
    ("made.mine", "base=5.0", "base=6.0"),
    ("made.held", "np.zeros(", "np.ones("),
    ("made.held", "x ** power", "x * power"),
    ("made.held", ", 2\n", ", 3\n"),
]


@pytest.mark.parametrize(("label", "old", "new"), EDITS)
def test_an_edited_maker_is_another_scheme(tmp_path, corpus, monkeypatch, label, old, new):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr("posenc.study.identity.source_digest", lambda *of: "")  # only fields count
    results = []
    for text in (MAKER, MAKER, MAKER.replace(old, new)):
        (tmp_path / "made.py").write_text(text)
        monkeypatch.delitem(sys.modules, "made", raising=False)
        importlib.invalidate_caches()
        results.append(digests(tmp_path, corpus, label))
    assert results[0] == results[1] != results[2]


def test_a_scheme_is_description_alike_in_every_process(tmp_path):
    """Sets have another order and objects another address in each."""
    (tmp_path / "made.py").write_text(MAKER)
    code = "import made; from posenc.study.identity import description; "
    code += "print(description(made.held()), description(made.mine(head_dim=8)))"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    outputs = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        outputs.add(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert len(outputs) == 1
    assert b"0x" not in outputs.pop()


def test_an_edited_posenc_and_another_framework_are_noticed(tmp_path, corpus, monkeypatch):
    package = tmp_path / "package"
    shutil.copytree(Path(posenc.__file__).parent, package)
    for changed in ("schemes/alibi.py", "study/windows.py", "attn/reference.py"):
        before = digest_of_posenc(monkeypatch, package)
        (package / changed).write_text((package / changed).read_text() + "# edited\n")
        assert digest_of_posenc(monkeypatch, package) != before
    for shown in ("study/report.py", "cli/main.py", "testing/law.py"):
        before = digest_of_posenc(monkeypatch, package)
        (package / shown).write_text((package / shown).read_text() + "# edited\n")
        assert digest_of_posenc(monkeypatch, package) == before
    (run,) = study(tmp_path, schemes=("nope",)).runs(corpus, BACKENDS[0])
    for name, other in (("posenc_digest", "0" * 64), ("versions", ("numpy 1.0",))):
        changed = replace(run, **{name: other})
        assert changed.file_name() != run.file_name()
        with pytest.raises(RuntimeError, match="since the study was planned"):
            list(runs.carry_out([changed], corpus))
    assert [name.split()[0] for name in run.versions][:2] == ["numpy", BACKENDS[0]]


def digest_of_posenc(monkeypatch, package):
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(identity, "find_spec", {"posenc": spec}.get)
    identity.posenc_digest.cache_clear()
    try:
        return identity.posenc_digest(BACKENDS[0])
    finally:
        monkeypatch.undo()
        identity.posenc_digest.cache_clear()


def test_files_that_count_import_none_that_do_not():
    for package in ("posenc", *(f"posenc_{name}" for name in BACKENDS)):
        for name, file in identity._files(package):
            home = name.removesuffix(".py").replace("/", ".")
            imported = _imports(file.read_bytes(), _package(home, file))
            modules = {f"{module.replace('.', '/')}.py" for module in imported}
            assert not [m for m in modules if m.startswith(identity._NO_EFFECT)], name


FOREIGN = {  # every way for a scheme to depend on another file
    "outer.py": "import json, numpy, absent\n",
    "lone.py": "top = 1\n",
    "base.py": """\
from dataclasses import dataclass
import posenc, lone
@dataclass(frozen=True)
class Base(posenc.PositionScheme):
    slope: float = 1.0
""",
    "kit/__init__.py": "whole = 1\n",
    "kit/scheme.py": """\
from base import Base
from .rates import rate as pace
class Mine(Base):
    def bias(self, q, k, *, params, xp):
        from . import late
        return None
""",
    "kit/rates.py": "rate = 1\n",
    "kit/late.py": "import deep.down\n",
    "deep/down.py": "depth = 1\n",
}


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    for name, text in FOREIGN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def digest(label="kit.scheme.Mine"):
    return source_digest(layers(label, recipe()).schemes)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_scheme_is_known_by_all_files_that_it_is_made_of(foreign, name):
    before = digest()
    assert len(before) == 64
    assert digest() == before
    (foreign / name).write_text(FOREIGN[name] + "# edited\n")
    assert (digest() == before) == (name == "outer.py")  # which nothing imports
    (foreign / name).write_text(FOREIGN[name])
    assert digest() == before


@pytest.mark.parametrize("label", ["rope+kit.scheme.Mine", "nope/kit.scheme.Mine"])
def test_a_scheme_is_known_wherever_it_stands(foreign, label):
    before = digest(label)
    assert len(before) == 64
    (foreign / "kit" / "rates.py").write_text("# edited\n" + FOREIGN["kit/rates.py"])
    assert digest(label) != before


def test_a_digest_imports_nothing(foreign):
    digest()
    assert "kit.rates" in sys.modules
    assert not {"kit.late", "deep", "deep.down"} & set(sys.modules)


def test_installed_packages_are_not_read(foreign):
    digest()  # imported from here on
    (foreign / "lone.py").write_text("import json, numpy.testing, posenc.attention, absent.too\n")
    (foreign / "kit" / "late.py").write_text("from ....far import away\nimport deep.down\n'\\d'\n")
    (foreign / "kit" / "rates.py").write_text("rate = 1\nimport made_by_hand\n")
    (foreign / "deep" / "down.py").write_bytes(b"\0 compiled")
    read = []
    whole = Path.read_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "made_by_hand", type(sys)("made_by_hand"))
        patch.setattr(Path, "read_bytes", lambda path: read.append(path) or whole(path))
        digest()
    assert read
    assert all(path.is_relative_to(foreign) for path in read)


@pytest.mark.parametrize("label", CATALOGUE)
def test_schemes_of_posenc_are_known_by_its_version(label):
    assert digest(label) == ""


def test_an_installed_package_is_read_as_a_whole(foreign, monkeypatch):
    installed = foreign / "site-packages"
    installed.mkdir()
    for name in ("base.py", "lone.py", "kit", "deep"):
        (foreign / name).rename(installed / name)
    monkeypatch.syspath_prepend(str(installed))
    before = digest()
    (installed / "deep" / "down.py").write_text("# another distribution's\n")
    (installed / "lone.py").write_text("# another distribution's\n")
    assert digest() == before
    for name in ("kit/rates.py", "base.py"):
        (installed / name).write_text(FOREIGN[name] + "# edited\n")
        assert digest() != before
        before = digest()


def test_a_class_without_a_file_has_no_digest(monkeypatch):
    typed = type("Typed", (posenc.PositionScheme,), {"__module__": "typed_in"})
    assert source_digest([typed()]) == ""


@long
def test_an_edited_helper_trains_a_scheme_again(tmp_path, corpus, records, foreign):
    one = study(tmp_path, schemes=("alibi", "kit.scheme.Mine"))
    assert [r["error"] for r in records(one)] == [None, None]
    assert plan(one, corpus)[1] == []
    (foreign / "kit" / "rates.py").write_text("rate = 2\n")
    assert [c.scheme for c in plan(one, corpus)[1]] == ["kit.scheme.Mine"]


def test_a_run_that_fails_is_a_record_and_is_tried_again(tmp_path, corpus, records, monkeypatch):
    one, make = study(tmp_path), runs.make_trainer

    def broken(run, *rest):
        if run.scheme == "alibi":
            raise MemoryError("no room")
        return make(run, *rest)

    monkeypatch.setattr(runs, "make_trainer", broken)
    failed, fine = records(one)
    assert (failed["status"], failed["error"]) == ("failed", "MemoryError: no room")
    assert fine["status"] == "ok"
    monkeypatch.undo()
    assert [c.scheme for c in plan(one, corpus)[1]] == ["alibi"]


def test_divergence_is_a_record(tmp_path, records):
    (record,) = records(study(tmp_path, schemes=("nope",), learning_rate=1e30, clip=1e30, steps=9))
    assert record["status"] == "failed"
    assert "diverged" in record["error"]


class Dying(Executor):
    """Workers that are killed: every future ends in an exception."""

    def submit(self, function, /, *arguments):
        future = Future()
        future.set_exception(RuntimeError("killed"))
        return future


def test_a_worker_that_dies_leaves_a_record(tmp_path, corpus):
    one = study(tmp_path)
    ended = list(compute(one, plan(one, corpus)[1], executor=Dying()))
    assert [r["error"] for r in ended] == ["RuntimeError: killed"] * 2


class Killed(ThreadPoolExecutor):
    """A worker that is killed at its ``left``-th job from now, and takes those after it along."""

    left = 0

    def submit(self, function, /, *arguments):
        Killed.left -= function is work
        if Killed.left >= 0:
            return super().submit(function, *arguments)
        future = Future()
        future.set_exception(BrokenProcessPool("terminated abruptly"))
        return future


@pytest.mark.parametrize(("killed_at", "tries"), [((1, 9), 2), ((0, 1, 9), 3), ((1, 0), 2)])
def test_new_workers_go_on_where_one_was_killed(tmp_path, corpus, monkeypatch, killed_at, tries):
    """Every run is computed once; if none finishes between two deaths, the study ends."""
    one, begun, each = study(tmp_path, seeds=2), [], iter(killed_at)

    @contextmanager
    def pool(study, jobs, executor):
        begun.append(jobs)
        Killed.left = next(each)
        with Killed(1) as pool:
            yield pool, None

    monkeypatch.setattr(runner, "_pool", pool)
    monkeypatch.setattr(runner, "read_corpus", lambda text: corpus)
    missing = plan(one, corpus)[1]
    with pytest.warns(UserWarning, match=r"a worker process died, so new ones go on with \d runs"):
        ended = list(compute(one, missing))
    assert len(begun) == tries
    assert sorted(r["run"] for r in ended) == sorted(run.digest() for run in missing)
    fine = [r for r in ended if r["status"] == "ok"]
    assert len(fine) == (1 if killed_at[-1] == 0 else 4)
    assert all("its worker process died" in r["error"] for r in ended if r not in fine)
    assert len(plan(one, corpus)[0]) == len(fine)


def test_text_that_changed_is_noticed(tmp_path, corpus):
    one = study(tmp_path)
    run = one.runs(corpus, BACKENDS[0])[0]
    with pytest.raises(ValueError, match="text changed"):
        list(runs.carry_out([run], replace(corpus, sha256="1" * 64)))


def test_csv_is_tidy_and_failed_runs_are_in_it(tmp_path, records):
    ended = records(study(tmp_path))
    ended.append({"scheme": "x", "seed": 0, "status": "failed", "error": "Oops", "train_len": 16})
    write_tables(tmp_path, ended)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["eval_len"] for row in rows] == ["16", "32", "16", "32", ""]
    assert float(rows[1]["loss"]) == ended[0]["loss"]["32"]
    assert rows[-1]["error"] == "Oops"
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["scheme"] for line in lines] == ["alibi", "rope", "x"]


def test_a_file_is_never_half_written(tmp_path):
    path, record = tmp_path / "record.json", {"seed": 0, "run": "a", "loss": {"64": 1, "128": 2}}
    save(path, record)
    with pytest.raises(TypeError):
        save(path, {"scheme": object()})
    assert list(load(path, "a")["loss"]) == ["64", "128"]  # in order, not as JSON sorts them
    assert load(path, "a") == record
    assert load(path, "b") is load(tmp_path / "absent.json", "a") is None


def test_many_may_write_one_file(tmp_path):
    """A shared temporary name would make most of these fail."""
    path = tmp_path / "results.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: write_whole(path, f"{n}" * 10_000), range(100)))
    assert len(set(path.read_text())) <= 2
    assert list(tmp_path.iterdir()) == [path]


def test_only_leftovers_of_dead_processes_are_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    own = partial_path(tmp_path / "own")
    left, far, old = (
        own.with_name(own.name.replace(str(os.getpid()), str(dead.pid))),
        tmp_path / f".own.0f0f0f0f-{dead.pid}-0f0f0f0f.partial",
        tmp_path / f".own.1f0f0f0f-{dead.pid}-0f0f0f0f.partial",
    )
    for path in (own, far, old, tmp_path / "results.csv"):
        path.touch()
    left.mkdir()
    os.utime(old, (0, 0))
    sweep(tmp_path, "own")
    assert {path.name for path in tmp_path.iterdir()} == {own.name, far.name, "results.csv"}


RECORD = f"rope-0-{'0f' * 8}.json"
STRANGE = [
    "thesis.partial",
    "thesis.progress",
    ".thesis.partial",
    f".thesis.0f0f0f0f-1-{'0f' * 4}.partial",
    f".{RECORD}.0f0f0f0f-{'9' * 30}-{'0f' * 4}.partial",
    f".{RECORD}.0f0f0f0f-1-{'0f' * 4}.partial.txt",
    f"{RECORD}.partial",
    f"thesis-{RECORD}.progress.txt",
]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_of_the_users_is_swept(tmp_path, kind):
    """Whatever its age: only names that a study writes are leftovers of one."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "chapter.txt").write_text("years of work")
    out = tmp_path / "out"
    for folder in (out, out / "runs", out / "earlier"):
        folder.mkdir()
        for name in STRANGE:
            if kind == "link":
                (folder / name).symlink_to(kept)
            elif kind == "folder":
                shutil.copytree(kept, folder / name)
            else:
                (folder / name).write_text("years of work")
            if kind != "link":
                os.utime(folder / name, (0, 0))
    before = sorted(out.rglob("*"))
    runs_folder(Study(out=str(out)))
    publish_text(out, ["a"], "first")
    publish_text(out, ["b"], "second")
    assert set(before) <= {*out.rglob("*")}
    assert (kept / "chapter.txt").read_text() == "years of work"


def test_leftovers_of_a_study_are_swept_from_its_folders(tmp_path):
    runs = tmp_path / "runs"
    (tmp_path / ".results.0f0f0f0f-1-0f0f0f0f.partial").mkdir()
    (tmp_path / "earlier" / ".0f0f0f0f0f0f.0f0f0f0f-1-0f0f0f0f.partial").mkdir(parents=True)
    runs.mkdir()
    for name in (f".{RECORD}", f".{RECORD}.progress", ".probe"):
        (runs / f"{name}.0f0f0f0f-1-0f0f0f0f.partial").touch()
    (runs / f"{RECORD}.progress").touch()
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    runs_folder(Study(out=str(tmp_path)))
    publish_text(tmp_path, ["a"], "first")
    publish_text(tmp_path, ["b"], "second")
    assert not list(runs.iterdir())
    assert not list(tmp_path.rglob(".*"))


def test_a_number_that_is_no_process_stops_no_study(tmp_path):
    own = partial_path(tmp_path / "probe")
    own.with_name(own.name.replace(str(os.getpid()), "9" * 10)).touch()
    sweep(tmp_path, "probe")
    own.with_name(own.name.replace(str(os.getpid()), "9" * 30)).touch()
    sweep(tmp_path, "probe")
    assert len(list(tmp_path.iterdir())) == 2


def test_no_signal_is_sent_where_it_would_stop_a_process(tmp_path, monkeypatch):
    """On Windows ``os.kill(process, 0)`` is Ctrl-C; there, age alone tells a leftover."""
    monkeypatch.setattr(results_module, "_CAN_ASK", False)
    monkeypatch.setattr(os, "kill", lambda *arguments: pytest.fail("a signal was sent"))
    new, old = (partial_path(tmp_path / "probe") for _ in range(2))
    new.touch()
    old.touch()
    os.utime(old, (0, 0))
    sweep(tmp_path, "probe")
    assert list(tmp_path.iterdir()) == [new]


def test_seconds_of_a_study_are_those_of_its_runs():
    times = [(0.0, 10.0), (5.0, 10.0), (6.0, 1.0), (1000.0, 2.0)]  # two at a time, then resumed
    ended = [{"status": "ok", "began": b, "seconds": s} for b, s in times] + [{"status": "failed"}]
    assert seconds(ended) == {"wall_seconds": 17.0, "run_seconds": 23.0, "longest_run": 10.0}
    assert seconds([])["wall_seconds"] == 0


OK, FAILED = {"status": "ok"}, {"status": "failed"}


def publish_text(out, runs, text, records=(OK,), names=("results.csv", "report.html")):
    def render(folder):
        for name in names:
            (folder / name).write_text(text)

    return publish(out, {"wall_seconds": 1.0}, records, runs, render)


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_files_of_a_study_come_together_or_not_at_all(tmp_path):
    def broken(folder):
        (folder / "results.csv").write_text("new")
        raise OSError("disk full")

    publish_text(tmp_path, ["a", "b"], "good")
    before = texts(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        publish(tmp_path, {}, [OK], ["c"], broken)
    assert texts(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"results.csv", "report.html", STUDY}


def test_an_earlier_study_is_kept_and_the_same_one_is_not(tmp_path):
    assert publish_text(tmp_path, ["a", "b"], "first")[1] is None
    assert publish_text(tmp_path, ["b", "a"], "again", [OK, OK])[1] is None
    lost = publish_text(tmp_path, ["a", "b"], "lost one", [OK, FAILED])[1]
    assert lost is not None
    assert texts(lost)["results.csv"] == "again"  # fewer runs ended well
    other = publish_text(tmp_path, ["c"], "other", names=("results.csv",))[1]
    assert other == lost
    assert texts(other)["report.html"] == "lost one"
    assert set(texts(tmp_path)) == {"results.csv", STUDY}
    assert texts(tmp_path)["results.csv"] == "other"
    assert len(list((tmp_path / "earlier").iterdir())) == 1


def test_files_without_a_study_json_are_kept(tmp_path):
    for name in ("results.csv", "table.md", "notes.txt"):
        (tmp_path / name).write_text("old")
    earlier = publish_text(tmp_path, ["a"], "new")[1]
    assert texts(earlier) == {"results.csv": "old", "table.md": "old"}
    assert texts(tmp_path)["notes.txt"] == "old"


def test_a_study_file_from_elsewhere_touches_nothing_outside(tmp_path):
    out, outside = tmp_path / "out", tmp_path / "mine.txt"
    publish_text(out, ["a"], "theirs")
    outside.write_text("mine")
    about = json.loads((out / STUDY).read_text())
    about |= {"files": ["../mine.txt", str(outside)], "study": "../../out"}
    (out / STUDY).write_text(json.dumps(about))
    earlier = publish_text(out, ["b"], "ours")[1]
    assert earlier.parent == out / "earlier"
    assert texts(earlier).keys() == {STUDY, "results.csv", "report.html"}
    assert outside.read_text() == "mine"


NAMED = ["notes.txt", "../mine.txt", ".", "..", "runs", "folder", "link", "table.md", "loss.svg"]


@pytest.mark.parametrize("same", [True, False], ids=["same study", "another study"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "not sealed"])
def test_a_study_removes_no_file_that_it_did_not_write(tmp_path, sealed, same):
    """Even if ``study.json`` names it; what a new file replaces is kept."""
    out = tmp_path / "out"
    publish_text(out, ["a"], "first")
    mine = [tmp_path / "mine.txt", out / "notes.txt", out / "runs" / "a.json"]
    mine += [out / "folder" / "a.txt", out / "table.md"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (out / "link").symlink_to(tmp_path / "mine.txt")
    (out / "loss.svg").symlink_to(tmp_path / "mine.txt")
    about = json.loads((out / STUDY).read_text())
    about["files"] += [*NAMED, str(tmp_path / "mine.txt")]
    if sealed:
        about["sha256"] |= dict.fromkeys(NAMED, hashlib.sha256(b"mine").hexdigest())
        del about["sha256"]["table.md"], about["sha256"]["loss.svg"]
    else:
        del about["sha256"]
    (out / STUDY).write_text(json.dumps(about))
    publish_text(out, ["a" if same else "b"], "second")
    assert all(path.read_text() == "mine" for path in mine)
    assert (out / "link").is_symlink()
    assert (out / "loss.svg").is_symlink()
    assert texts(out)["results.csv"] == "second"


def test_a_file_that_a_new_one_replaces_is_kept_unless_the_study_wrote_it(tmp_path):
    (tmp_path / "report.html").write_text("of the user")
    first = publish_text(tmp_path, ["a"], "first")[1]
    assert texts(first) == {"report.html": "of the user"}
    assert publish_text(tmp_path, ["a"], "again")[1] is None
    (tmp_path / "report.html").write_text("edited")
    second = publish_text(tmp_path, ["a"], "more")[1]
    assert second is not None
    assert texts(second) == {"report.html": "edited"}
    (second / "notes.txt").write_text("years of work")
    third = publish_text(tmp_path, ["b"], "other")[1]
    assert texts(third)["report.html"] == "more"
    assert texts(first) == {"report.html": "of the user"}
    assert texts(second) == {"report.html": "edited", "notes.txt": "years of work"}


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_moved(tmp_path):
    publish_text(tmp_path, ["a"], "first")
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(IsADirectoryError, match=r"cannot write 'report\.html'"):
        publish_text(tmp_path, ["a"], "again")
    assert texts(tmp_path)["results.csv"] == "first"


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"files": [[]], "study": 1, "runs": 1}', "[" * 100_000, "\\udc00"]
    + [f'{{"files": [], "study": "a", "runs": {n}}}' for n in ("Infinity", "NaN", '"x"', "null")],
    ids=range(9),
)  # fmt: skip
def test_a_broken_study_file_stops_no_study(tmp_path, text):
    (tmp_path / STUDY).write_text(text)
    assert publish_text(tmp_path, ["a"], "first")[1] is None
    assert texts(tmp_path)["results.csv"] == "first"


def test_a_study_of_failures_replaces_no_good_one(tmp_path, capsys):
    publish_text(tmp_path, ["a"], "good")
    failed = {"scheme": "x", "seed": 0, "status": "failed", "error": "Oops", "train_len": 16}
    write_all(tmp_path, {"wall_seconds": 0.0}, [failed], ["b"])
    assert texts(tmp_path)["results.csv"] == "good"
    assert "belong to an earlier study and are kept" in capsys.readouterr().out
    write_all(tmp_path / "new", {"wall_seconds": 0.0}, [failed], ["b"])
    assert "Oops" in texts(tmp_path / "new")["results.csv"]


@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["alibi,rope:base=5,layout=half", "nope"], ["alibi", "rope:base=5,layout=half", "nope"]),
        (["rope:base=5,rotary_dim=4+rope:base=6"], ["rope:base=5,rotary_dim=4+rope:base=6"]),
        (["rope, alibi"], ["rope", "alibi"]),
        (["rope,", "alibi ,nope"], ["rope", "alibi", "nope"]),
        (["rope + nope", "rope", "+", "t5"], ["rope+nope", "rope+t5"]),
        (["rope @ 8 / nope", "rope/nope,t5@ 3"], ["rope@8/nope", "rope/nope", "t5@3"]),
        (["rope@8,nope", "rope", "/", "t5"], ["rope@8", "nope", "rope/t5"]),
        (["a.B:x='p / q@r, s'/t5"], ["a.B:x='p / q@r, s'/t5"]),
        (["rope: base = 5, layout=half t5"], ["rope:base=5,layout=half", "t5"]),
        (["a.B:x=(1, 2),y='p, q+r' t5"], ["a.B:x=(1, 2),y='p, q+r'", "t5"]),
        (["a.B:x=[(1, 2), (3,)]+t5,nope"], ["a.B:x=[(1, 2), (3,)]+t5", "nope"]),
    ],
)
def test_words_are_cut_into_labels(words, labels):
    assert split(words) == tuple(labels)
    assert split(labels) == tuple(labels)


def test_labels():
    (many,) = parse("rope : base=1e+5 + a.B:x=[(1, 2), (3,)],y='p, q+r/s@t',z=p")
    assert [(part.name, dict(part.options)) for part in many.parts] == [
        ("rope", {"base": 1e5}),
        ("a.B", {"x": [(1, 2), (3,)], "y": "p, q+r/s@t", "z": "p"}),
    ]
    assert [part.text for part in many.parts] == [
        "rope:base=1e+5",
        "a.B:x=[(1, 2), (3,)],y='p, q+r/s@t',z=p",
    ]
    ((part,),) = (layer.parts for layer in parse("rope:base=5e5,layout=interleaved"))
    assert dict(part.options) == {"base": 5e5, "layout": "interleaved"}


ROPE, NOPE, ALIBI = posenc.RoPE(head_dim=8), posenc.NoPE(), posenc.ALiBi(2)
MEANT = [
    ("rope", [ROPE], [None]),
    ("rope/nope", [ROPE, NOPE], [None]),
    ("rope+alibi", [Sum(ROPE, ALIBI)], [None]),
    ("rope@512", [ROPE], [512]),
    ("rope@512/rope@512/nope", [ROPE, ROPE, NOPE], [512, 512, None]),
    ("rope+alibi@8/nope", [Sum(ROPE, ALIBI), NOPE], [8, None]),
    ("rope:base=5e5@512/nope", [replace(ROPE, base=5e5), NOPE], [512, None]),
    ("rope:base=5+alibi/nope@03", [Sum(replace(ROPE, base=5), ALIBI), NOPE], [None, 3]),
    ("rope:base=1e+5@7", [replace(ROPE, base=1e5)], [7]),
    (" rope : base = 5 @ 6 / alibi + nope ", [replace(ROPE, base=5), Sum(ALIBI, NOPE)], [6, None]),
]


@pytest.mark.parametrize(("label", "schemes", "windows"), MEANT)
def test_the_meaning_of_a_label(label, schemes, windows):
    assert layers(label, recipe(layers=5)) == LayerPlan.of(schemes, 5, windows)
    assert split([label]) == ("".join(label.split()),)


ACCEPTED = (
    r"; accepted: name or name:option=value,option=value; a\+b for their sum on one layer, "
    r"a/b for layers in turn, a@512 for a layer with a window of 512, a~b to train as a and "
    r"test as b$"
)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        *((f"rope@{w}", f"has a window '{w}'; it is an integer") for w in ("0", "x", "", "-1")),
        ("rope@512.0", "has a window '512.0'"),
        ("rope@8@9", "has a window '8@9'"),
        ("rope@8+alibi", r"has a window '8\+alibi'; .* and ends a layer"),
        ("rope@8:base=5", "has a window '8:base=5'; .* and ends a layer"),
        ("rope@'8'", "has a window \"'8'\""),
        ("rope//nope", "has an empty name"),
        ("/rope", "has an empty name"),
        ("rope/", "has an empty name"),
        ("rope+", "has an empty name"),
        ("+", "has an empty name"),
        ("", "has an empty name"),
        ("@8", "has an empty name"),
        (":base=5", "has no name before ':base=5'"),
        ("base=5", "has an option without a name, 'base=5'"),
        ("rope:base", "has an option 'base', which must read name=value"),
        ("rope:'b, c'", "has an option \"'b, c'\", which must"),
    ],
)
def test_labels_that_mean_nothing(label, message):
    with pytest.raises(ValueError, match=f"^scheme {re.escape(repr(label))} {message}.*{ACCEPTED}"):
        parse(label)


def test_fitted_settings_by_scheme():
    labels = ["t5", "rope", "rope+t5@8/t5:num_buckets=8,scaled=False", "t5:causal=1,num_buckets=4"]
    assert fitted_settings(labels, recipe()) == {
        "t5": "causal=True, num_buckets=16, max_distance=16",
        "t5:num_buckets=8,scaled=False": "causal=True, max_distance=16",
        "t5:causal=1,num_buckets=4": "max_distance=16",
    }


@pytest.mark.parametrize("train_len", [2, 4, 8, 31, 64, 500])
def test_no_bucket_lies_beyond_the_training_length(train_len):
    scheme, *_ = layers("t5", recipe(train_len=train_len, eval_lens=())).schemes
    distances = -np.arange(train_len)
    reached = scheme.bucket(distances, xp=np)
    assert reached.max() >= scheme.num_buckets - 2
    assert scheme.max_distance <= train_len


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_len": 1}, "train_len must be at least 2, got 1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"heads": 3}, "heads must divide dim=16, got 3"),
        ({"eval_lens": (16, 0)}, "eval_lens must be at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"schemes": ()}, "schemes is empty"),
        ({"schemes": ("rope", "rope")}, "must name each scheme once"),
        ({"schemes": ("rpe",)}, "did you mean 'rope'"),
        ({"schemes": ("rope:bse=2",)}, "did you mean 'base'"),
        ({"schemes": ("rope:base",)}, "must read name=value"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"schemes": ("t5:num_heads=3",)}, "num_heads of 't5' comes from the model"),
        ({"schemes": ("nope", "rope:base=-3")}, "scheme 'rope:base=-3': base must be finite"),
        ({"schemes": ("t5:train_len=3",)}, "train_len of 't5' comes from the model"),
        ({"schemes": ("rope/nope/rope",)}, "names 3 layers for layers=2"),
        ({"schemes": ("rope",), "heads": 16}, "heads=16 of dim=16 do not suit .rope.: head_dim"),
        ({"schemes": ("rope+",)}, r"scheme 'rope\+' has an empty name; accepted: name or"),
        ({"schemes": ("rope@0",)}, "scheme 'rope@0' has a window '0'; it is an integer"),
        ({"schemes": ("alibi",), "windowed": ("rope",)}, "windowed names 'rope'; accepted: alibi"),
        ({"windowed": ("rpe",)}, "windowed names 'rpe' .did you mean 'rope'"),
        ({"schemes": (f"{__name__}.Short",)}, f"'{__name__}.Short' fails at length 32"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        Study(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, ["rope"]),
        ({"schemes": ("alibi",)}, []),
        ({"windowed": ()}, []),
        ({"windowed": ("alibi", "nope")}, ["alibi", "nope"]),
    ],
)
def test_rope_is_windowed_by_default_where_it_is_in_the_study(changes, windowed):
    one = Study(**SMALL, **changes)
    assert [label for label in one.schemes if one.is_windowed(label)] == windowed


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"unknown backend 'jaxx'.*did you mean 'jax'"):
        choose_backend("jaxx")
    assert choose_backend("auto") in BACKENDS


def test_a_missing_backend_is_told_how_to_install_it(monkeypatch):
    known = {"jax": False, "torch": False}
    monkeypatch.setattr("posenc.study.trainer.backends", lambda: known)
    with pytest.raises(RuntimeError, match=r"pip install 'posenc\[jax\]'$"):
        choose_backend("jax")
    with pytest.raises(RuntimeError, match=r"'posenc\[torch\]'; without a GPU, .* CPU index"):
        choose_backend("torch")


def test_the_two_sides_of_a_label():
    assert sides("rope") == ("rope", "rope")
    assert sides("rope : base = 5 ~ t5@8 / nope") == ("rope:base=5", "t5@8/nope")
    assert sides("a.B:x='p~q'~nope") == ("a.B:x='p~q'", "nope")
    assert split(["rope ~ nope", "alibi"]) == ("rope~nope", "alibi")
    plans = Plans.of("rope@3~nope/rope", recipe())
    assert plans.trained == LayerPlan.of(ROPE, 2, 3)
    assert plans.tested == LayerPlan.of([NOPE, ROPE], 2)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("rope~nope~t5", r"^scheme 'rope~nope~t5' has more than one '~'; accepted: "),
        ("rope~", "^scheme '' has an empty name"),
        ("nope~t5", r"'nope~t5' cannot be tested: layer 0 needs .*\{'table': .*training has none"),
        ("t5~t5:num_buckets=8", r"needs the learned arrays \{'table': .* training has \{'table'"),
    ],
)
def test_labels_that_cannot_be_tested(label, message):
    with pytest.raises(ValueError, match=message):
        Study(**SMALL, schemes=(label,))


@several_backends
@pytest.mark.parametrize("label", ["t5@5~alibi/t5@3", "sinusoidal~nope/rope@3"])
def test_a_model_is_tested_as_another(backend, label, corpus):
    """It keeps the learned arrays that the other scheme needs, whichever layers share them."""
    plans = Plans.of(label, recipe())
    model, decoder = trainer(backend, plans.trained)
    tokens = windows.held_out_stretches(corpus.validation, count=2, longest=32)
    losses = token_losses(model, tokens, None, plans.tested)
    by_hand = losses_by_hand(decoder, tokens, (None, 3), schemes=plans.tested.schemes)
    np.testing.assert_allclose(losses, by_hand, atol=1e-4)
    assert np.abs(losses - token_losses(model, tokens, None)).max() > 1e-2


def test_labels_that_train_alike_share_one_training(tmp_path, corpus, records, monkeypatch):
    labels, begun, make = ("rope", "alibi~nope", "rope~nope", "rope~rope@3"), [], runs.make_trainer
    monkeypatch.setattr(runs, "make_trainer", lambda *of: begun.append(of[0].seed) or make(*of))
    one = study(tmp_path, schemes=labels, seeds=2)
    ended = {(r["scheme"], r["seed"]): r for r in records(one)}
    assert [r["error"] for r in ended.values()] == [None] * 8
    assert sorted(begun[1:]) == [0, 0, 1, 1]
    of_rope = [ended[label, 1] for label in labels if label != "alibi~nope"]
    assert {r["trained_as"] for r in of_rope} == {"rope"}
    assert len({r["training"] for r in ended.values()}) == 4
    assert len({r["training"] for r in of_rope}) == 1
    assert len({r["loss"]["32"] for r in of_rope}) == 3
    assert of_rope[0]["tested_schemes"] is None
    assert of_rope[2]["tested_windows"] == [3, 3]
    assert of_rope[2]["windows"] == [None, None]
    spans = sorted((r["began"], r["began"] + r["seconds"]) for r in of_rope)
    assert all(end <= begin + 0.01 for (_, end), (begin, _) in pairwise(spans))
    # Alone, a label has the same losses: which labels share a training has no influence.
    alone = study(tmp_path / "alone", schemes=("rope~nope",))
    (record,) = records(alone)
    assert record["loss"] == ended["rope~nope", 0]["loss"]
    # A label that is missing is computed alone, and trains again.
    next(runs_folder(one).glob("rope-nope-0-*.json")).unlink()
    assert [run.scheme for run in plan(one, corpus)[1]] == ["rope~nope"]
    assert records(one)[-1]["loss"] == record["loss"]


def test_a_label_that_cannot_be_scored_fails_alone(tmp_path, corpus, records, monkeypatch):
    score = runs._scored

    def broken(run, *rest):
        if run.scheme == "rope":
            raise MemoryError("no room")
        return score(run, *rest)

    monkeypatch.setattr(runs, "_scored", broken)
    one = study(tmp_path, schemes=("rope", "rope~nope"))
    failed, fine = records(one)
    assert (failed["status"], failed["error"]) == ("failed", "MemoryError: no room")
    assert (fine["scheme"], fine["status"]) == ("rope~nope", "ok")
    assert [run.scheme for run in plan(one, corpus)[1]] == ["rope"]


def test_all_is_the_catalogue_and_what_cannot_be_made_is_a_row(
    tmp_path, corpus, records, monkeypatch
):
    def needs_more(*, head_dim, **sizes):
        raise ValueError("head_dim must be a multiple of 5")

    def scaled(*, head_dim, **sizes):
        return posenc.RoPE(head_dim=head_dim, base=5.0)

    scaled.trained_as = "rope"
    makers = {name: maker for name, maker in posenc.catalogue().items() if name in ("nope", "rope")}
    makers |= {"odd": needs_more, "rope_scaled": scaled}
    monkeypatch.setattr("posenc.study.specs.catalogue", lambda: makers)
    monkeypatch.setattr("posenc.makers.catalogue", lambda: makers)
    one = study(tmp_path, schemes=("rope", "all", "rope@3"))
    assert one.labels == ("rope", "nope", "odd", "rope~rope_scaled", "rope@3")
    ended = {r["scheme"]: r for r in records(one)}
    assert set(ended) == set(one.labels)
    error = "ValueError: heads=2 of dim=16 do not suit 'odd': head_dim must be a multiple of 5"
    assert ended["odd"]["error"] == error
    assert [r["status"] for name, r in ended.items() if name != "odd"] == ["ok"] * 4
    assert ended["rope"]["training"] == ended["rope~rope_scaled"]["training"]
    assert [run.scheme for run in plan(one, corpus)[1]] == ["odd"]  # is tried again
    with pytest.raises(ValueError, match="multiple of 5"):  # a label of the user's own
        study(tmp_path, schemes=("odd",))


@several_backends
@pytest.mark.parametrize("label", ["rope@20/t5", "alibi"])
def test_training_at_random_positions(backend, label, corpus):
    changed = {"random_positions": 40, "steps": 2}
    model, decoder = trainer(backend, layers(label, recipe(**changed)), **changed)
    drawn = windows.training_positions(40, seed=0, steps=2, length=16)
    assert drawn.shape == (2, 16)
    assert (np.diff(drawn) > 0).all()
    assert drawn.max() < 40
    assert not np.array_equal(*drawn)
    other = windows.training_positions(40, seed=1, steps=2, length=16)
    assert not np.array_equal(drawn, other)
    losses = train(model, batches(corpus, 2), recipe(**changed), drawn)
    own = decoder.plan.windows
    by_hand = losses_by_hand(decoder, batches(corpus, 2)[0], own, pos=drawn[0]).mean()
    assert losses[0] == pytest.approx(by_hand, abs=1e-5)
    assert abs(losses_by_hand(decoder, batches(corpus, 2)[0], own).mean() - by_hand) > 1e-4


def test_random_positions_are_an_option(tmp_path, corpus, records):
    plain, drawn = study(tmp_path), study(tmp_path, random_positions=64)
    before, after = records(plain), records(drawn)
    assert [r["error"] for r in after] == [None, None]
    for one, other in zip(before, after, strict=True):
        assert one["weights_sha256"] == other["weights_sha256"]
        assert one["curve"] != other["curve"]
    with pytest.raises(ValueError, match="random_positions must be at least 16, got 15"):
        recipe(random_positions=15)
    # Makers are told how far training reaches, and tables are long enough for it.
    assert layers("learned", recipe(random_positions=64)).schemes[0].max_len == 64
    assert layers("t5", recipe(random_positions=64)).schemes[0].max_distance == 64


def test_a_plan_of_layers_is_a_label():
    plan = layers("rnope:base=5,window=3", recipe(layers=4))
    near = (replace(ROPE, base=5), 3)
    assert list(zip(plan.schemes, plan.windows, strict=True)) == [near, near, near, (NOPE, None)]
    assert Plans.of("rope~rnope", recipe()).tested.schemes == (ROPE, NOPE)
    for label in ("rnope/rope", "rnope+rope", "rnope@3", "rope/rnope"):
        with pytest.raises(ValueError, match="'rnope' is a plan of all layers, so it is a label"):
            layers(label, recipe())
    with pytest.raises(ValueError, match="layers of 'rnope' comes from the model"):
        layers("rnope:layers=3", recipe())
    assert fitted_settings(["rope~rnope:every=3"], recipe()) == {"rnope:every=3": "window=8"}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_every_plan_can_be_made_for_the_default_study(name):
    plan = layers(name, Recipe())
    assert len(plan.schemes) == 2


@long
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_scheme_of_the_catalogue_trains(tmp_path, records, backend):
    # JAX compiles each for seconds.
    labels = (*one_of_each_kind(), "rope~rope_yarn") if backend == "jax" else ("all",)
    one = study(tmp_path, schemes=labels, backend=backend, steps=2)
    ended = records(one)
    assert {record["scheme"]: record["error"] for record in ended} == dict.fromkeys(one.labels)
    assert len({record["training"] for record in ended}) < len(ended)
