"""``benchmarks/gpu_check.py --framework jax`` in small: what it writes, notices and counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

import posenc
from posenc.backend import prepare

if not require("jax"):
    pytest.skip("jax is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_check  # noqa: E402
import jax  # noqa: E402
from harness import (  # noqa: E402
    cases,
    clock,
    correctness,
    exact,
    jax_checks,
    jax_run,
    jax_variants,
    ratios,
    speed,
    variants,
)
from harness.correctness import Check  # noqa: E402
from harness.device import Device  # noqa: E402
from harness.run import params_of  # noqa: E402

import posenc_jax  # noqa: E402
from posenc_jax.chunked.blocks import make_tiling  # noqa: E402

QUICK = ["--framework", "jax", "--device", "cpu", "--quick", "--seed", "3"]
ABSENT = Device("jax", "cpu", quick=True, compiles=None).absent()
ON_CPU = tuple(
    implementation for implementation in posenc_jax.IMPLEMENTATIONS if implementation not in ABSENT
)


@pytest.fixture
def few(monkeypatch):
    """One kind of call of two schemes, and a variant of each sort."""
    schemes = cases.schemes
    monkeypatch.setattr(
        correctness, "schemes", lambda dim: {n: schemes(dim)[n] for n in ("alibi", "t5")}
    )
    monkeypatch.setattr(correctness, "LAYOUTS", {"causal": cases.LAYOUTS["causal"]})
    others = [v for v in jax_variants.baselines() if v.name != "alibi jax cudnn bias"]
    monkeypatch.setattr(jax_variants, "baselines", lambda: others)
    own = [
        jax_variants.ours("alibi", "pallas"),
        jax_variants.ours("alibi", "chunked"),
        jax_variants.ours("t5", "chunked", learns=True),
    ]
    monkeypatch.setattr(jax_variants, "of_this_library", lambda few: own)


def run(tmp_path, *more):
    """The exit code, and what was written."""
    out = tmp_path / "result.json"
    code = gpu_check.main([*QUICK, "--out", str(out), *more])
    return code, json.loads(out.read_text())


@long
def test_a_dry_run(few, tmp_path, capsys):
    code, result = run(tmp_path, "--compiles", "20")
    assert code == 0, [row for row in result["checks"] if row["status"] in ("wrong", "failed")]
    assert {"python", "jax", "jaxlib", "posenc", "platform"} <= set(result["versions"])
    assert result["device"]["name"] == "cpu"
    assert set(result["auto"]) == {"none", "alibi", "slopes", "t5"}
    assert "the device is a cpu" in result["absent"]["pallas"]
    assert {"xla", "chunked", "reference"} <= set(ON_CPU)
    tried = {(r["implementation"], r["scheme"], r["dtype"]) for r in result["checks"]}
    assert tried == {
        (implementation, scheme, dtype)
        for implementation in ON_CPU
        for scheme in ("alibi", "t5")
        for dtype in ("bfloat16", "float32")
    }
    for row in result["checks"]:
        assert row["status"] == "right", row
        assert {"out", "q", "k", "v"} <= set(row["errors"])
        assert ("table" in row["errors"]) == (row["scheme"] == "t5")
        for error in row["errors"].values():
            assert 0 <= max(error["relative"], error["largest"]) <= error["allowed"]
    timings = {(r["variant"], r["length"]): r for r in result["timings"]}
    chunked = timings["alibi chunked", 256]
    assert chunked["right"]
    assert set(chunked["errors"]) == {"out", "out of step", "q", "k", "v"}
    for stage in ("forward", "step"):
        assert 0 < chunked[stage]["q1"] <= chunked[stage]["median"] <= chunked[stage]["q3"]
        assert chunked[f"TFLOP/s of {stage}"] > 0
        assert chunked[f"bytes of {stage}"] > 0
        assert chunked[f"seconds to compile {stage}"] > 0
    learned = timings["t5 chunked, learned", 256]
    assert "forward" not in learned
    assert set(learned["errors"]) == {"out of step", "q", "k", "v", "table"}
    assert timings["none jax cudnn", 256]["status"] == "refused"
    assert timings["alibi pallas", 256]["status"] == "refused"
    assert timings["none tokamax", 256]["status"] == "refused"
    assert not any("ratio" in row for row in result["ratios"])
    output = capsys.readouterr().out
    assert "step, ms" in output
    assert "absent   pallas: implementation 'pallas' cannot serve this call" in output


@long
def test_a_wrong_implementation_is_noticed(few, tmp_path, monkeypatch, capsys):
    attention = posenc_jax.attention

    def shifted(*tensors, implementation="auto", **options):
        return attention(*tensors, implementation=implementation, **options) + 0.1 * (
            implementation == "chunked"
        )

    monkeypatch.setattr(posenc_jax, "attention", shifted)
    monkeypatch.setattr("posenc_jax.testing.attention", shifted)
    schemes = correctness.schemes
    monkeypatch.setattr(correctness, "schemes", lambda dim: {"alibi": schemes(dim)["alibi"]})
    code, result = run(tmp_path, "--compiles", "20")
    assert code == 1
    assert {r["implementation"] for r in result["checks"] if r["status"] == "wrong"} == {"chunked"}
    wrong = {r["variant"] for r in result["timings"] if r.get("right") is False}
    assert wrong == {"alibi chunked", "t5 chunked, learned"}
    assert result["counts"]["wrong timings"] == 4
    assert "wrong    chunked alibi causal float32" in capsys.readouterr().out


@long
@pytest.mark.parametrize("scheme", ["fox", "kerple_log"])
def test_gradients_of_gates_and_params_are_checked(scheme):
    framework = jax_checks.Checked(quickly=True)
    row = correctness.run_check(Check("chunked", scheme, "grouped", "float32"), framework, 0, 0.1)
    assert row["status"] == "right", row
    own = (
        {"tokens.x", "w", "b"} if scheme == "fox" else set(cases.schemes(64)[scheme].param_specs())
    )
    assert set(row["errors"]) == {"out", "q", "k", "v"} | own


def test_blocks_are_as_large_as_they_are():
    call = prepare(*[jax.numpy.zeros((1, 1, 4096, 8))] * 3, posenc.NoPE(), xp=jax.numpy)
    default = make_tiling(call).q_block
    with jax_checks.Checked(quickly=True).precision_scope(["float32"]):
        assert make_tiling(call).q_block == default
        assert jax.config.jax_default_matmul_precision == "highest"


@long
def test_every_scheme_and_layout_of_the_implementations_that_are_there_is_planned():
    side = Device("jax", "cpu", quick=False, compiles=None)
    plan = side.plan()
    tried = {(c.implementation, c.scheme, c.layout, c.dtype) for c in plan}
    assert len(plan) == len(tried) + len(ON_CPU) * len(cases.CORE)
    assert len(tried) == len(ON_CPU) * len(cases.schemes(64)) * len(cases.LAYOUTS) * 4


@long
def test_the_kernels_of_this_library_are_checked_first(monkeypatch):
    monkeypatch.setattr(jax_checks, "absent", dict)
    plan = Device("jax", "cpu", quick=False, compiles=None).plan()
    first = [check for check in plan[:60] if check.dtype == "bfloat16"]
    assert {c.implementation for c in first[:4]} == {"pallas"}
    assert {c.layout for c in first[:4]} > {"causal"}
    assert len({c.scheme for c in first[:4]}) > 1
    # Then each of the others has one soon.
    assert {c.implementation for c in first} == set(posenc_jax.IMPLEMENTATIONS)


def test_a_sample_is_of_several_calls():
    seen = []

    def program(arrays):
        seen.append(arrays)
        return [arrays["x"]]

    ready = jax_run.FrameworkRunner().ready(lambda a: a["x"], {"x": np.zeros(2)}, "forward")
    ready._program, ready.calls = program, 4
    sample = ready.sample()
    assert len(seen) == 4
    assert 0 < sample["host of forward"] <= sample["forward"]


def test_what_is_too_large_is_not_run(monkeypatch):
    settings = speed.Settings("bfloat16", heads=2, dim=64, lengths=(64,))
    runner = jax_run.FrameworkRunner("cpu")

    def row_of(implementation, budget):
        own = [jax_variants.ours("alibi", implementation)]
        (row,) = speed.Timing(runner, settings, own, budget).rows()
        return row

    row = row_of("chunked", clock.Budget(60, compiles=1))
    assert (row["status"], row["reason"]) == ("not run", "no compilations left")
    monkeypatch.setattr(runner, "free", lambda: 1000.0)
    row = row_of("chunked", clock.Budget(60))
    assert row["status"] == "refused"
    assert "0.0 are free" in row["reason"]
    assert row_of("xla", clock.Budget(60))["reason"] == "a dense bias takes about 0 GiB"


@long
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_what_timings_are_compared_with_is_the_reference(scheme, monkeypatch):
    monkeypatch.setattr(exact, "_BLOCK_PAIRS", 2 * 40 * 10)
    inputs = variants.Inputs(jax_run.FrameworkRunner("cpu"), 2, 40, 8, "float32")

    @jax.jit
    def attend(tokens, params):
        return posenc_jax.attention(
            *tokens, inputs.schemes[scheme], params, causal=True, implementation="reference"
        )

    params = params_of(inputs.params(scheme))
    out, pull = jax.vjp(attend, list(inputs.tokens.values()), params)
    (d_q, d_k, d_v), d_params = jax.jit(pull)(inputs.d_out)
    answers = {"out": out, "q": d_q, "k": d_k, "v": d_v, **d_params}
    expected = exact.Expected(inputs)
    errors = expected.errors(scheme, answers)
    assert max(e["relative"] for e in errors.values()) < 1e-4
    errors = expected.errors(scheme, {name: array * 1.01 for name, array in answers.items()})
    assert all(e["relative"] == pytest.approx(0.01, rel=0.1) for e in errors.values())


def timing(variant, ms, step, length=8192, **more):
    role = "baseline" if " jax " in variant else "ours"
    row = {"variant": variant, "length": length, "role": role, "right": True, "reason": None}
    row |= {"host of forward": {"median": 2.0}, "host of step": {"median": 2.0}}
    return row | {"forward": {"median": ms}, "step": {"median": step}} | more


def test_ratios():
    timings = [
        timing("none jax cudnn", 1.0, 4.0),
        timing("alibi jax cudnn bias", 3.0, 12.0),
        timing("none pallas", 1.25, 8.0),
        timing("alibi pallas", 1.0, 5.0),
        timing("t5 pallas", 0.5, 1.0, right=False),
        timing("none jax cudnn", 64.0, 256.0, length=65536),
        timing("alibi pallas", 16.0, 128.0, length=65536),
    ]
    rows = ratios.ratios(timings, ratios.GOALS["jax"], (8192, 65536))
    result = {(r["goal"], r["stage"], r["length"]): r for r in rows if "ratio" in r}
    summary = {
        key: (r["ratio"], r["status"] == "met")
        for key, r in result.items()
        if r["least"] is not None
    }
    assert summary == {
        ("pallas, no bias, 8192 / cuDNN", "forward", 8192): (0.8, True),
        ("pallas, no bias, 8192 / cuDNN", "step", 8192): (0.5, False),
        ("pallas ALiBi, 8192 / cuDNN", "forward", 8192): (1.0, True),
        ("pallas ALiBi, 8192 / cuDNN", "step", 8192): (0.8, True),
        ("pallas ALiBi, far / cuDNN", "forward", 65536): (4.0, True),
        ("pallas ALiBi, far / cuDNN", "step", 65536): (2.0, False),
        ("pallas ALiBi / cuDNN with a dense bias", "forward", 8192): (3.0, True),
        ("pallas ALiBi / cuDNN with a dense bias", "step", 8192): (2.4, True),
        ("pallas ALiBi, device / host", "forward", 8192): (0.5, False),
        ("pallas ALiBi, device / host", "step", 8192): (2.5, True),
    }
    # What is wrong is not fast.
    assert not any("T5" in goal for goal, _, _ in result)


def test_a_gpu_that_is_not_there_is_told():
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="JAX sees no GPU"):
        Device("jax", "cuda", quick=True, compiles=None)


def test_bytes_are_those_of_temporaries_and_results():
    given = {"x": np.zeros(1000, np.float32)}
    ready = jax_run.FrameworkRunner().ready(lambda a: a["x"] + 1, given, "forward")
    assert ready.peak_memory() >= 4000
