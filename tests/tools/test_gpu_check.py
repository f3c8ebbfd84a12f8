"""``benchmarks/gpu_check.py`` in small: what it writes, what it notices, how it counts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
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
    device,
    exact,
    ratios,
    speed,
    torch_checks,
    torch_clock,
    torch_run,
    torch_variants,
    variants,
)
from harness.correctness import Check  # noqa: E402
from harness.run import params_of  # noqa: E402

import posenc_torch  # noqa: E402

BASELINES = torch_variants.baselines()
QUICK = ["--device", "cpu", "--quick", "--compiles", "0", "--seed", "3"]


@pytest.fixture(autouse=True)
def known_rates(request, monkeypatch):
    """What the device reaches is measured in the long part alone: it takes seconds."""
    if not request.node.get_closest_marker("long"):
        monkeypatch.setattr(device, "rates", lambda *_: {"product, TFLOP/s": 1.0})


@pytest.fixture
def few(monkeypatch):
    """Two kinds of calls of three schemes, and two variants."""
    names = ("alibi", "t5", "rope")
    schemes = cases.schemes
    monkeypatch.setattr(correctness, "schemes", lambda dim: {n: schemes(dim)[n] for n in names})
    layouts = {name: cases.LAYOUTS[name] for name in ("causal", "fully-masked")}
    monkeypatch.setattr(correctness, "LAYOUTS", layouts)
    own = [torch_variants.ours("alibi", "sdpa"), torch_variants.ours("t5", "flex")]
    measure(monkeypatch, BASELINES[:3], own)


def measure(monkeypatch, baselines, own):
    """Time only these variants of this library and of the baselines."""
    monkeypatch.setattr(torch_variants, "baselines", lambda: baselines)
    monkeypatch.setattr(torch_variants, "of_this_library", lambda few: own)


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
    assert set(ours["errors"]) == {"out", "out of step", "q", "k", "v"}
    assert ours["wall of step"] > 0
    for stage in ("forward", "backward", "step"):
        assert 0 < ours[stage]["q1"] <= ours[stage]["median"] <= ours[stage]["q3"]
        assert ours[f"TFLOP/s of {stage}"] > 0
    assert timings["none torch sdpa cudnn", 256]["status"] == "refused"
    assert timings["t5 flex", 256]["reason"] == "no compilations left"
    assert {"best ALiBi / best SDPA"} == {r["goal"] for r in result["ratios"] if "ratio" in r}
    goals = {goal.name for goal in ratios.GOALS["torch"]}
    assert {r["goal"] for r in result["ratios"]} == goals
    assert all(r["reason"] for r in result["ratios"] if r["status"] == "not measured")
    output = capsys.readouterr().out
    assert "step, ms" in output
    assert result["report"][0] in output
    assert output.endswith(f"{tmp_path}/results/result.json\n")


@long
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
    measure(monkeypatch, BASELINES[:1], [torch_variants.ours("alibi", "sdpa")])
    code, result = run(tmp_path)
    assert code == 1
    assert {r["implementation"] for r in result["checks"] if r["status"] == "wrong"} == {"sdpa"}
    assert result["counts"]["wrong timings"] == 2
    # What is wrong is not fast.
    assert not any("ratio" in row for row in result["ratios"])
    assert "wrong    sdpa alibi causal float32" in capsys.readouterr().out


def test_a_scheme_with_gates_is_right():
    framework = torch_checks.Checked("cpu", compiles=False)
    row = correctness.run_check(Check("sdpa", "fox", "grouped", "float32"), framework, 0)
    assert row["status"] == "right", row
    assert set(row["errors"]) == {"out", "q", "k", "v", "tokens.x", "w", "b"}


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


@long
def test_every_implementation_scheme_and_layout_is_planned():
    framework = torch_checks.Checked("cpu", compiles=False)
    plan = correctness.plan(framework, compiled=("flex",))
    assert len(set(plan)) == len(plan)
    tried = {(c.implementation, c.scheme, c.layout, c.dtype) for c in plan}
    every = len(posenc_torch.IMPLEMENTATIONS) * len(cases.schemes(64)) * len(cases.LAYOUTS) * 4
    assert len(tried) == every
    rounded = {(c.implementation, c.scheme) for c in plan if c.tf32}
    assert len(rounded) == len(posenc_torch.IMPLEMENTATIONS) * len(cases.CORE)
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
    role = "baseline" if "torch" in variant else "trial" if "score_mod" in variant else "ours"
    row = {"variant": variant, "length": length, "role": role, "right": True, "reason": None}
    host = {"host of forward": {"median": 6.0}}
    return row | {"forward": {"median": ms}} | host | more


def ratios_of(timings, lengths=(65536,)):
    """What was measured of forward passes, and the reasons for the rest, by goal."""
    rows = ratios.ratios(timings, ratios.GOALS["torch"], lengths)
    rows = [r for r in rows if r["stage"] == "forward"]
    measured = {
        r["goal"]: (r["ratio"], r["status"], r["ours"], r["baseline"]) for r in rows if "ratio" in r
    }
    return measured, {r["goal"]: r["reason"] for r in rows if "ratio" not in r}


FLEX, CUDNN = "none torch flex", "none torch sdpa cudnn"
TIMINGS = [
    timing("none torch sdpa", 30.0),
    timing(CUDNN, 20.0),
    timing(FLEX, 24.0),
    timing("alibi flex", 5.0),
    timing("alibi flex, all blocks", 25.0),
    timing("alibi folded", 40.0),
    timing("alibi chunked", 1.0, right=False),
    timing("alibi flex", 7.0, length=8192),
    timing("alibi score_mod", 26.0),
    timing("alibi score_mod USE_TMA", 13.0),
]


def test_ratios():
    measured, reasons = ratios_of(TIMINGS)
    assert measured == {
        "flex ALiBi / plain flex": (4.8, "met", "alibi flex", FLEX),
        "flex ALiBi, all blocks / plain flex": (0.96, "met", "alibi flex, all blocks", FLEX),
        "folded ALiBi / best SDPA": (0.5, "missed", "alibi folded", CUDNN),
        "best ALiBi / best SDPA": (4.0, "met", "alibi flex", CUDNN),
        "ALiBi, skipping / best SDPA": (4.0, "measured", "alibi flex", CUDNN),
        "ALiBi, skipping, far / best SDPA": (4.0, "met", "alibi flex", CUDNN),
        "flex ALiBi, device / host": (1.167, "met", "alibi flex", "its host"),
        "score_mod USE_TMA / without": (
            2.0, "measured", "alibi score_mod USE_TMA", "alibi score_mod",
        ),
    }  # fmt: skip
    assert reasons["flex T5 / plain flex"] == "t5 flex: not reached"


def test_a_goal_without_its_baseline_is_not_measured():
    failed = timing(FLEX, 24.0, reason="FailOnRecompileLimitHit: too many")
    del failed["forward"]
    measured, reasons = ratios_of([failed, *[t for t in TIMINGS if t["variant"] != FLEX]])
    assert "flex ALiBi / plain flex" not in measured
    reason = "none torch flex: FailOnRecompileLimitHit: too many"
    assert reasons["flex ALiBi / plain flex"] == reason
    _, reasons = ratios_of([], lengths=(1024,))
    assert reasons["flex ALiBi / plain flex"] == "alibi flex*: not reached"


def test_times_in_which_the_host_waits_count_for_no_goal():
    waits = {"forward makes the host wait": True}
    slow = [timing("alibi flex", 5.0, **waits), timing("alibi flex, all blocks", 25.0, **waits)]
    measured, reasons = ratios_of([*slow, timing(FLEX, 24.0)])
    assert not measured
    assert reasons["flex ALiBi / plain flex"] == (
        "alibi flex: it makes the host wait; alibi flex, all blocks: it makes the host wait"
    )
    waits = {"step makes the host wait": True}
    measured, _ = ratios_of([timing("alibi flex", 5.0, **waits), timing(FLEX, 24.0)])
    assert measured["flex ALiBi / plain flex"][0] == 4.8


def test_the_causal_blocks_of_the_baseline_are_those_of_the_library():
    own = torch_variants.causal_blocks(640, torch.device("cpu"))
    other = posenc_torch.block_mask(640, 640, causal=True)
    assert torch.equal(own.to_dense(), other.to_dense())
    assert torch.equal(own.full_kv_num_blocks, other.full_kv_num_blocks)
    # PyTorch 2.11 reads the full lists with the strides of the partial ones.
    assert own.full_kv_indices.stride() == own.kv_indices.stride()
    assert own.full_q_indices.stride() == own.q_indices.stride()


SMALL = {"heads": 1, "dim": 16, "lengths": (2304,), "rounds": (1, 1)}


def speed_rows(*timed, **sizes):
    settings = speed.Settings("bfloat16", **{**SMALL, **sizes})
    runner = torch_run.FrameworkRunner("cpu")
    return list(speed.Timing(runner, settings, timed, clock.Budget(60)).rows())


@long
def test_a_wrong_gradient_of_far_keys_is_noticed(monkeypatch):
    attention = posenc_torch.attention

    def without(q, k, v, *rest, **options):
        k = torch.cat([k[:, :, :2048], k[:, :, 2048:].detach()], dim=2)
        return attention(q, k, v, *rest, **options)

    variant = torch_variants.ours("none", "sdpa")
    (row,) = speed_rows(variant)
    assert row["right"], row
    monkeypatch.setattr(posenc_torch, "attention", without)
    (row,) = speed_rows(variant)
    assert not row["right"]
    wrong = [name for name, e in row["errors"].items() if e["relative"] > e["allowed"]]
    assert wrong == ["k"]


@pytest.mark.parametrize("scheme", ["alibi", "t5", "slopes"])
def test_what_timings_are_compared_with_is_the_reference(scheme, monkeypatch):
    monkeypatch.setattr(exact, "_BLOCK_PAIRS", 3 * 40 * 10)
    inputs = variants.Inputs(torch_run.FrameworkRunner("cpu"), 3, 40, 8, "float64")
    params = params_of(inputs.params(scheme))
    q, k, v, *learned = leaves = [
        a.clone().requires_grad_() for a in (*inputs.tokens.values(), *params.values())
    ]
    wide = {n: p.double() for n, p in zip(params, learned, strict=True)}
    out = posenc_torch.attention(
        q, k, v, inputs.schemes[scheme], wide, causal=True, implementation="reference"
    )
    gradients = torch.autograd.grad(out, leaves, inputs.d_out)
    answers = dict(zip(["out", "q", "k", "v", *params], [out.detach(), *gradients], strict=True))
    expected = exact.Expected(inputs)
    assert max(e["relative"] for e in expected.errors(scheme, answers).values()) < 1e-5
    for name, array in answers.items():
        errors = expected.errors(scheme, {name: array * 1.001})
        assert errors[name]["relative"] == pytest.approx(1e-3, rel=0.1)


def test_the_first_and_the_last_head_are_always_compared():
    assert exact.chosen_heads(1, 8192) == [0]
    assert exact.chosen_heads(16, 8192) == list(range(16))
    assert exact.chosen_heads(16, 131072) == [0, 15]


def test_a_baseline_that_fails_is_an_error(few, tmp_path, monkeypatch, capsys):
    def broken(inputs):
        raise ValueError("nothing works")

    measure(monkeypatch, [variants.Variant("none torch sdpa", broken)], [])
    code, result = run(tmp_path, "--only", "speed")
    assert code == 1
    assert result["counts"]["bad"] == 2
    assert result["ended by"] is None
    assert "wrong    none torch sdpa at 512: ValueError: nothing works" in result["report"]


@long
def test_a_host_that_waits_is_reported(few, tmp_path, monkeypatch):
    measure(monkeypatch, BASELINES[:1], [torch_variants.ours("alibi", "sdpa")])
    first = torch_clock.Clock.first
    monkeypatch.setattr(torch_clock.Clock, "first", lambda *a: (first(*a)[0], 0, True))
    code, result = run(tmp_path, "--only", "speed")
    assert code == 0
    assert not any("ratio" in row for row in result["ratios"])
    assert "alibi sdpa: it makes the host wait" in {r.get("reason") for r in result["ratios"]}
    assert any("alibi sdpa (step) 512 256" in line for line in result["report"])


def test_a_run_that_is_stopped_leaves_what_it_has(few, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "_WRITING_SHARE", 1e9)
    measure(monkeypatch, BASELINES[:1], [torch_variants.ours("alibi", "sdpa")])
    sampled = []

    def stopped(self, entry, kind):
        sampled.append(kind)
        if len(sampled) == 3:
            raise KeyboardInterrupt
        return {"forward": 1.0} if kind == "forward" else {"step": 1.0}

    monkeypatch.setattr(speed.Timing, "_sample", stopped)
    code, result = run(tmp_path, "--only", "speed")
    assert code == 1
    assert result["ended by"]["reason"] == "KeyboardInterrupt: KeyboardInterrupt"
    rows = {row["variant"]: row for row in result["timings"]}
    assert rows["alibi sdpa"]["errors"]["k"]["relative"] < 0.1
    assert result["report"]


@long
def test_a_device_that_is_lost_ends_the_run(few, tmp_path, monkeypatch, capsys):
    def lost(*_, **__):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(torch_checks.Checked, "pullback", lost)
    monkeypatch.setattr(torch_checks.Checked, "check_device", lost)
    code, result = run(tmp_path)
    assert code == 1
    assert result["ended by"]["reason"] == "RuntimeError: an illegal address"
    (row,) = result["checks"]
    assert row["status"] == "failed"
    assert "in lost" in row["traceback"]
    assert "ended by RuntimeError: an illegal address" in capsys.readouterr().out


def test_one_traceback_is_kept_for_each_reason():
    rows = [{"reason": reason, "traceback": "..."} for reason in ("one", "one", "other")]
    gpu_check._keep_first_traces(rows)
    assert ["traceback" in row for row in rows] == [True, False, True]


def test_other_digits_of_a_second_call_are_reported(monkeypatch):
    attention = posenc_torch.attention

    def racing(*tensors, **options):
        out = attention(*tensors, **options)
        return out + 1e-3 * torch.rand_like(out)

    (row,) = speed_rows(torch_variants.ours("none", "sdpa"), lengths=(128,))
    assert row["forward repeats"]
    assert not any("race" in line for line in gpu_check._remarks([row]))
    monkeypatch.setattr(posenc_torch, "attention", racing)
    (row,) = speed_rows(torch_variants.ours("none", "sdpa"), lengths=(128,))
    assert row["right"]
    assert any("race: none sdpa (forward) 128" in line for line in gpu_check._remarks([row]))


def test_the_result_goes_where_the_environment_says(tmp_path, monkeypatch):
    files = []
    monkeypatch.setattr(gpu_check, "_measure", lambda *_: None)
    monkeypatch.setattr(gpu_check.record, "write", lambda path, result: files.append(path))
    monkeypatch.setenv("OUT", str(tmp_path))
    gpu_check.main(QUICK)
    monkeypatch.delenv("OUT")
    gpu_check.main(QUICK)
    assert files == [tmp_path / "torch-cpu.json", gpu_check.HERE / "results" / "torch-cpu.json"]


def test_the_reference_answers_once_for_all_implementations(monkeypatch):
    framework, asked = torch_checks.Checked("cpu", compiles=False), []
    answers = correctness._answers

    def counted(call, framework, implementation, dtype, d_out):
        asked.append((implementation, dtype))
        return answers(call, framework, implementation, dtype, d_out)

    monkeypatch.setattr(correctness, "_answers", counted)
    checks = [
        Check(implementation, "alibi", "decode", dtype)
        for implementation in ("sdpa", "chunked")
        for dtype in ("float32", "bfloat16")
    ]
    rows = list(correctness.run(checks, framework, clock.Budget(60), 0))
    assert {row["status"] for row in rows} == {"right"}
    assert asked.count(("reference", "float64")) == 1
    assert len(asked) == 5


def test_float32_products_may_be_rounded_in_some_checks(monkeypatch):
    framework, seen = torch_checks.Checked("cpu", compiles=False), {}
    attend = framework.attend

    def rounded(implementation, tensors, **options):
        seen[implementation] = torch.get_float32_matmul_precision()
        return attend(implementation, tensors, **options) * (1 + 1.5e-3)

    check = Check("sdpa", "alibi", "odd", "float32")
    monkeypatch.setattr(framework, "attend", rounded)
    known = correctness._reference(torch_checks.Checked("cpu", False), 1.0, "alibi", "odd", 0)
    row = correctness.run_check(check, framework, 0, reference=lambda *_: known)
    assert (row["status"], seen) == ("wrong", {"sdpa": "highest"})
    row = correctness.run_check(replace(check, tf32=True), framework, 0, reference=lambda *_: known)
    assert (row["status"], seen) == ("right", {"sdpa": "high"})
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("isolates", sorted({False, torch_variants._ISOLATES}))
def test_a_baseline_has_its_own_limit_of_compilations(isolates, monkeypatch):
    monkeypatch.setattr(torch_variants, "_ISOLATES", isolates)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch_variants, "flex_attention", lambda q, *_, **__: q + 1)
    torch_variants.own_program.cache_clear()
    own, other = (torch_variants.own_program(name) for name in ("one", "other"))
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        for length in (2, 3, 4):
            for run in (own, other):
                assert torch.equal(run(torch.ones(length), *[None] * 5), torch.full((length,), 2.0))
    torch_variants.own_program.cache_clear()


def test_an_option_that_torch_lacks_is_refused():
    inputs = variants.Inputs(torch_run.FrameworkRunner("cpu"), 2, 256, 16, "bfloat16")
    with pytest.raises(NotImplementedError, match="has no option NEWER"):
        torch_variants._score_mod({"NEWER": True}, inputs)
    if not torch_variants._has_flash_kernels():
        with pytest.raises(NotImplementedError, match=r"flash_attn\.cute is not installed"):
            torch_variants._score_mod({"BACKEND": "FLASH"}, inputs)


def test_other_arguments_are_refused(capsys):
    for wrong in (["--minutes", "0"], ["--framework", "numpy"], ["--only", "fast"]):
        with pytest.raises(SystemExit):
            gpu_check.main([*QUICK, *wrong])
    assert "must be positive, got 0" in capsys.readouterr().err
