"""``benchmarks/gpu_check.py`` in small: what it writes, what it notices, how it counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require
from sample import long

if not require("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_check  # noqa: E402
import torch  # noqa: E402
from harness import (  # noqa: E402
    cases,
    clock,
    correctness,
    ratios,
    torch_checks,
    torch_runner,
    torch_variants,
)
from harness.correctness import Check  # noqa: E402

import posenc_torch  # noqa: E402

QUICK = ["--device", "cpu", "--quick", "--compiles", "0", "--seed", "3"]


@pytest.fixture
def few(monkeypatch):
    """Two kinds of calls of three schemes, and two variants."""
    names = ("alibi", "t5", "rope")
    schemes = cases.schemes
    monkeypatch.setattr(correctness, "schemes", lambda dim: {n: schemes(dim)[n] for n in names})
    layouts = {name: cases.LAYOUTS[name] for name in ("causal", "fully-masked")}
    monkeypatch.setattr(correctness, "LAYOUTS", layouts)
    monkeypatch.setattr(torch_runner, "baselines", lambda: torch_variants.baselines()[:3])
    monkeypatch.setattr(
        torch_runner,
        "of_this_library",
        lambda: [torch_variants.ours("alibi", "sdpa"), torch_variants.ours("t5", "flex")],
    )


def run(tmp_path, *more):
    """The exit code, and what was written."""
    out = tmp_path / "results" / "result.json"
    code = gpu_check.main([*QUICK, "--out", str(out), *more])
    return code, json.loads(out.read_text())


@long
def test_a_dry_run(few, tmp_path, capsys):
    code, result = run(tmp_path)
    assert code == 0, [row for row in result["checks"] if row["status"] in ("wrong", "failed")]
    assert {"python", "torch", "posenc", "driver", "commit"} <= set(result["versions"])
    assert result["arguments"]["seed"] == 3
    assert result["device"]["name"] == "cpu"
    assert set(result["auto"]) == {"none", "alibi", "slopes", "t5"}
    tried = {(r["implementation"], r["scheme"]) for r in result["checks"]}
    assert len(tried) == len(posenc_torch.IMPLEMENTATIONS) * 3
    for row in result["checks"]:
        assert row["status"] in ("right", "refused"), row
        assert row["status"] == "refused" or "out" in row["errors"]
        assert row["reason"] or {"q", "k", "v"} <= set(row["errors"])
        for error in row.get("errors", {}).values():
            assert 0 <= max(error["relative"], error["largest"]) <= error["allowed"]
    learned = [
        r for r in result["checks"] if (r["implementation"], r["scheme"]) == ("reference", "t5")
    ]
    assert learned
    assert all("table" in r["errors"] for r in learned)
    timings = {(r["variant"], r["length"]): r for r in result["timings"]}
    ours = timings["alibi sdpa", 256]
    assert ours["right"]
    for stage in ("forward", "backward", "step"):
        assert 0 < ours[stage]["q1"] <= ours[stage]["median"] <= ours[stage]["q3"]
        assert ours[f"TFLOP/s of {stage}"] > 0
    assert timings["none torch sdpa cudnn", 256]["status"] == "failed"
    assert timings["t5 flex", 256]["reason"] == "no compilations left"
    assert {"best ALiBi / best SDPA"} == {r["goal"] for r in result["ratios"]}
    assert "step, ms" in capsys.readouterr().out


def test_a_wrong_implementation_is_noticed(few, tmp_path, monkeypatch, capsys):
    attention = posenc_torch.attention

    def shifted(*tensors, implementation="auto", **options):
        return attention(*tensors, implementation=implementation, **options) + 0.1 * (
            implementation == "sdpa"
        )

    monkeypatch.setattr(posenc_torch, "attention", shifted)
    monkeypatch.setattr("posenc_torch.testing.attention", shifted)
    schemes = correctness.schemes
    monkeypatch.setattr(correctness, "schemes", lambda dim: {"alibi": schemes(dim)["alibi"]})
    code, result = run(tmp_path)
    assert code == 1
    assert {r["implementation"] for r in result["checks"] if r["status"] == "wrong"} == {"sdpa"}
    assert result["counts"]["wrong timings"] == 2
    # What is wrong is not fast.
    assert not result["ratios"]
    assert "wrong    sdpa alibi causal float32" in capsys.readouterr().out


def test_a_scheme_with_gates_is_right():
    framework = torch_checks.Checked("cpu", compiles=False)
    row = correctness.run_check(Check("sdpa", "forgetting", "grouped", "float32"), framework, 0)
    assert row["status"] == "right", row
    assert set(row["errors"]) == {"out", "q", "k", "v", "x", "w", "b"}


@pytest.mark.parametrize("name", ["k", "table"])
def test_a_wrong_gradient_is_noticed(name, monkeypatch):
    framework = torch_checks.Checked("cpu", compiles=False)
    pullback = framework.pullback

    def wrong(function, arrays, names, d_out, compiler):
        out, result = pullback(function, arrays, names, d_out, compiler)
        at = next(n for n in result if n.endswith(name))
        return out, result | {at: result[at] * (1 + 1e-3)}

    expected = correctness._answers
    check = Check("sdpa", "t5", "odd", "float32")
    assert correctness.run_check(check, framework, 0)["status"] == "right"

    def answers(asked, framework, implementation, dtype, d_out):
        monkeypatch.setattr(
            framework, "pullback", pullback if implementation == "reference" else wrong
        )
        return expected(asked, framework, implementation, dtype, d_out)

    monkeypatch.setattr(correctness, "_answers", answers)
    row = correctness.run_check(check, framework, 0)
    assert row["status"] == "wrong"
    beyond = [n for n, e in row["errors"].items() if e["relative"] > e["allowed"]]
    assert beyond == [name]


def test_what_is_not_finite_is_wrong():
    held = np.array([1.0, np.nan])
    assert correctness.array_errors(held, np.ones(2)) == {"relative": None, "largest": None}
    assert correctness.array_errors(np.ones(2), np.ones(2)) == {"relative": 0, "largest": 0}


def test_an_error_is_a_result(monkeypatch):
    framework = torch_checks.Checked("cpu", compiles=False)
    monkeypatch.setattr(framework, "attend", lambda *_, **__: 1 / 0)
    row = correctness.run_check(Check("sdpa", "alibi", "odd", "float32"), framework, 0)
    assert (row["status"], row["reason"]) == ("failed", "ZeroDivisionError: division by zero")


def test_what_the_budget_does_not_allow_is_recorded():
    framework = torch_checks.Checked("cpu", compiles=False)
    checks = [
        Check(implementation, "alibi", "decode", "float32") for implementation in ("sdpa", "flex")
    ]
    rows = list(
        correctness.run(checks, framework, clock.Budget(9, compiles=0), 0, compiled=("flex",))
    )
    assert [row["status"] for row in rows] == ["right", "not run"]
    assert rows[1]["reason"] == "no compilations left"
    (row, _) = correctness.run(checks, framework, clock.Budget(0), 0)
    assert row["reason"] == "no time left"


def test_every_implementation_scheme_and_layout_is_planned():
    framework = torch_checks.Checked("cpu", compiles=False)
    plan = correctness.plan(framework, compiled=("flex",))
    assert len(set(plan)) == len(plan)
    tried = {(c.implementation, c.scheme, c.layout, c.dtype) for c in plan}
    every = len(posenc_torch.IMPLEMENTATIONS) * len(cases.schemes(64)) * len(cases.LAYOUTS) * 4
    assert len(tried) == every
    flex = [check for check in plan if check.implementation == "flex"]
    assert (flex[0].scheme, flex[0].layout, flex[0].dtype) == ("alibi", "causal", "bfloat16")


def test_runs_take_turns():
    order = []

    def ran(name):
        def run():
            order.append(name)
            return {"forward": float(len(order))}

        return run

    result = clock.interleave({n: ran(n) for n in "abc"}, 5, clock.Budget(60))
    assert all(len(samples) == 5 for samples in result.values())
    assert all(sorted(order[n : n + 3]) == ["a", "b", "c"] for n in range(0, 15, 3))
    result = clock.interleave({n: ran(n) for n in "abc"}, 5, clock.Budget(0))
    assert all(len(samples) == 1 for samples in result.values())


def test_a_summary_is_of_medians():
    stages = clock.summary([{"step": ms} for ms in (1.0, 100.0, 2.0, 3.0, 2.0)])
    assert stages == {"step": {"median": 2.0, "q1": 2.0, "q3": 3.0, "n": 5}}


def timing(variant, ms, length=65536, **more):
    row = {"variant": variant, "length": length, "ours": "torch" not in variant, "right": True}
    return row | {"forward": {"median": ms}} | more


def test_ratios():
    timings = [
        timing("none torch sdpa", 30.0),
        timing("none torch sdpa cudnn", 20.0),
        timing("none torch flex", 24.0),
        timing("alibi flex", 5.0),
        timing("alibi flex, all blocks", 25.0),
        timing("alibi folded", 40.0),
        timing("alibi chunked", 1.0, right=False),
        timing("alibi flex", 7.0, length=4096),
    ]
    result = {r["goal"]: r for r in ratios.ratios(timings) if r["stage"] == "forward"}
    summary = {name: (r["ratio"], r["met"], r["ours"], r["baseline"]) for name, r in result.items()}
    flex, cudnn = "none torch flex", "none torch sdpa cudnn"
    assert summary == {
        "flex ALiBi / plain flex": (4.8, True, "alibi flex", flex),
        "flex ALiBi, all blocks / plain flex": (0.96, True, "alibi flex, all blocks", flex),
        "folded ALiBi / best SDPA": (0.5, False, "alibi folded", cudnn),
        "best ALiBi / best SDPA": (4.0, True, "alibi flex", cudnn),
        "ALiBi, skipping / best SDPA": (4.0, None, "alibi flex", cudnn),
        "ALiBi, skipping, far / best SDPA": (4.0, True, "alibi flex", cudnn),
    }
    assert {r["length"] for r in result.values()} == {65536}


def test_the_causal_blocks_of_the_baseline_are_those_of_the_library():
    own = torch_variants.causal_blocks(640, torch.device("cpu"))
    other = posenc_torch.block_mask(640, 640, causal=True)
    assert torch.equal(own.to_dense(), other.to_dense())
    assert torch.equal(own.full_kv_num_blocks, other.full_kv_num_blocks)


def test_other_arguments_are_refused(capsys):
    for wrong in (["--minutes", "0"], ["--framework", "numpy"], ["--only", "fast"]):
        with pytest.raises(SystemExit):
            gpu_check.main([*QUICK, *wrong])
    assert "must be positive, got 0" in capsys.readouterr().err
