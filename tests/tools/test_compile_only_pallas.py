"""``benchmarks/compile_only/pallas``: how it reads a compiled kernel, and its arithmetic.

These tests compile nothing: that takes minutes, and compilers that tests do not need.
"""

import os
import sys
from pathlib import Path

import fused_by_definition
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("posenc_jax")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from compile_only.pallas import command, compile, loops, roofline  # noqa: E402

from posenc_jax.fused import devices, implementation  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

# A loop as compilers emit it: rotated, with two waits, and rare code moved behind it.
BODY = "\n".join(["ex2.approx.ftz.f32 %f1, %f2;"] * 33 + ["add.f32 %f1, %f2, %f3;"] * 40)
PTX = f"""Resources(smem_scratch_bytes=1000)
.version 8.6
.visible .entry kernel(
  .param .u64 a
)
.maxntid 384, 1, 1
{{
  .reg .pred %p<3>;
  // a comment; with a mark
  bra.uni $L_LAST;
$L_FIRST:
  {{
  LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
  @P1 bra.uni DONE;
  bra.uni LAB_WAIT;
  DONE:
  }}
  {{
  LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
  @P1 bra.uni DONE;
  bra.uni LAB_WAIT;
  DONE:
  }}
  {{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.aligned.m64n64k16.f32 {{%r1,%r2}}, p; }}
  mov.b32 %r3, %r4;
  @!%p1 bra $L_RARE;
$L_AGAIN:
{BODY}
  wgmma.mma_async.sync.aligned.m64n64k16.f32 {{%r1,%r2}}, %r5;
$L_LAST:
  setp.lt.s32 %p2, %r6, %r7;
  @%p2 bra $L_FIRST;
  ret;
$L_RARE:
  selp.f32 %f1, %f2, %f3, %p1;
  bra.uni $L_AGAIN;
}}
ptxas info    : Used 168 registers, used 2 barriers, 17 bytes smem
"""
WAIT = ["mbarrier.try_wait.parity.shared.b64", "bra.uni"]


def test_a_loop_is_the_shortest_round_trip():
    ops = loops.find_loop(PTX[PTX.index(".version") : PTX.index("ptxas")])
    assert sum(op.startswith("ex2") for op in ops) == 33
    assert sum(map(loops.is_product, ops)) == 2
    assert not any(op.startswith(("selp", "mov", "ret")) for op in ops)
    # Both waits, the flag p of a product, the branch to the rare code, and the end of the loop.
    assert len(ops) == 33 + 40 + 2 + 2 * len(WAIT) + 1 + 1 + 2
    assert sorted(op for op in ops if op in WAIT) == sorted(2 * WAIT)


def test_counts_are_per_score(monkeypatch):
    monkeypatch.setattr(loops, "disassemble", lambda ptx: None)
    counted = loops.count_loop(PTX)
    assert counted == {
        "instructions": round(83 / 32, 2),
        "exponentials": round(33 / 32, 3),
        "flops": 2 * 2 * 64 * 64 * 16 // (32 * 128),
        "counted in": "PTX",
    }
    assert loops.count_loop("nothing was printed") == {}
    assert loops.count_loop(PTX.replace("ex2", "rcp")) == {}


def test_machine_code_is_read_like_ptx():
    text = "\n".join(
        [
            ".section .text.kernel",
            "        /*0000*/                   LDC R1, c[0x0][0x28] ;",
            ".L_x_1:",
            "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ ;",
            *["        /*0020*/                   MUFU.EX2 R2, R3 ;"] * 32,
            "        /*0030*/                   NOP ;",
            "        /*0040*/               @P1 BRA `(.L_x_1) ;",
            "        /*0050*/                   EXIT ;",
        ]
    )
    ops = loops.find_loop(text)
    assert sorted(set(ops)) == ["BRA", "HGMMA.64x128x16.F32.BF16", "MUFU.EX2"]
    assert len(ops) == 34


def test_code_without_a_loop_has_none():
    assert loops.find_loop("add.f32 %f1, %f2, %f3;\nret;") == []
    assert loops.find_loop("wgmma.mma_async.m64n64k16 %r1;\nret;") == []


def test_transposes_of_matrices_are_counted():
    hlo = "\n".join(
        [
            "%a = bf16[2,4,2048,128]{3,2,1,0} transpose(%q), dimensions={0,2,1,3}",
            "%b = bf16[2,2048,4,128]{3,1,2,0} copy(%k)",
            "%c = f32[4,64,64]{2,1,0} transpose(%tiles), dimensions={0,2,1}",
            "%d = bf16[2,2048,4,128]{3,2,1,0} bitcast(%q)",
        ]
    )
    assert compile.count_transposes(hlo) == 2


def test_faults():
    wrong = {
        "kernels": {"forward": {"spills": 0, "serialized": True}, "d_keys": {"spills": 8}},
        "temporaries": {"2048": 100, "8192": 1600},
        "transposes": {"2048": 0, "8192": 3},
        "errors": {"d_queries": "ValueError: no"},
    }
    assert command.find_faults(wrong) == [
        "d_queries: ValueError: no",
        "d_keys spills 8 bytes",
        "forward waits for each product",
        "a step of 8192 has 3 transposes",
        "temporaries grow 4.00 times as fast as the length",
    ]
    fine = {"kernels": {"forward": {}}, "temporaries": {"2048": 100, "8192": 400}}
    assert command.find_faults(fine | {"transposes": {"2048": 0}, "errors": {}}) == []
    assert command.growth({"2048": 100}) is None


def test_times_follow_from_the_counts():
    kernel = {"flops": 512, "instructions": 8.0, "exponentials": 1.0, "bytes": 2**20}
    pairs = 16 * 8192**2 / 2
    times = roofline.predict_times(kernel, pairs, 8192, 16)
    assert times["products"] == pytest.approx(1e3 * pairs * 512 / 690e12)
    # 8 of 128 instructions a cycle are as long as 1 of 16 exponentials.
    assert times["others"] == pytest.approx(1e3 * pairs / 16 / (132 * 1.755e9))
    moved = 2**20 * (16 * 8192) / (roofline.BATCH * roofline.HEADS * roofline.LENGTHS[0])
    assert times["moved"] == pytest.approx(1e3 * moved / 4.8e12)
    assert times["best"] == times["products"]
    assert times["worst"] == times["products"] + times["others"]
    few = roofline.predict_times(kernel, 1.0, 8192, 16)
    assert few["best"] == few["worst"] == few["moved"]


def test_the_share_of_blocks():
    blocks = 512 // 64
    every = roofline.needed_share("none", 512, 64)
    # T5's last bucket begins below a distance of 128.
    assert every.pop("near") == 3 / blocks
    assert every == {side: pytest.approx((blocks + 1) / (2 * blocks)) for side in every}
    some = roofline.needed_share("alibi", 2048, 64)
    assert all(0.05 < some[side] < 0.5 for side in ("queries", "keys"))


def test_rows_of_a_prediction(monkeypatch):
    share = {"queries": 0.25, "keys": 0.125, "near": 0.01}
    monkeypatch.setattr(roofline, "needed_share", lambda *_: share)
    kernel = {"flops": 512, "instructions": 8.0, "exponentials": 1.0, "bytes": 0}
    rows = roofline.predict("alibi", {"forward": kernel, "d_keys": kernel}, 128)
    assert len(rows) == 3 * len(roofline.PREDICTED)
    forward, keys, step = rows[:3]
    assert forward["products, ms"] == pytest.approx(2 * keys["products, ms"], rel=1e-3)
    assert step["best, ms"] == pytest.approx(forward["best, ms"] + keys["best, ms"], rel=1e-3)
    # Half of the causal pairs, at 690 TFLOP/s against cuDNN's 644.
    assert forward["speed at best"] == pytest.approx(2 * 690 / 644, rel=1e-3)
    pairs = 16 * 8192 * 8193 / 2
    cudnn = 1e3 * 2 * 128 * pairs * (2 / 644e12 + 5 / 541e12)
    assert step["speed at best"] == pytest.approx(cudnn / step["best, ms"], rel=1e-3)
    assert "speed at best" not in keys


@pytest.mark.parametrize("form", compile.FORMS)
def test_one_kernel_gets_the_inputs_of_the_implementation(form, monkeypatch):
    for module in (devices, implementation):
        monkeypatch.setattr(module, "device_for", lambda target: fused_by_definition.DEVICE)
    case, length = compile.Case("h200", form, 64), 32
    given = compile.arguments(case, length)
    with targeting(Target("gpu", "9.0", interpreted=True)):
        out, _ = jax.eval_shape(lambda given: compile.one_kernel(case, "forward", given), given)
        d_q, *_ = jax.eval_shape(lambda given: compile.one_kernel(case, "d_queries", given), given)
        step, (gradients,) = jax.eval_shape(lambda g: compile.training_step(case, g), given)
    assert out.shape == d_q.shape == (compile.BATCH, compile.HEADS, length, 64)
    assert step.shape == given["q"].shape
    assert {"q", "k", "v", "params"} <= set(gradients)
    sides = {name for name in ("queries", "tokens") if name in gradients}
    assert sides == ({"queries", "tokens"} if form.startswith("gated") else set())
    assert all(list(gradients[side].features) == list(given[side].features) for side in sides)
    assert set(gradients["params"]) == set(given["params"])


def test_the_output_of_compilers_is_captured(capfd):
    with compile.captured_output() as printed:
        os.write(1, b"one\n")
        os.write(2, b"two\n")
    assert printed == ["one\ntwo\n"]
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_missing_compiler_is_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "missing_packages", lambda device: "a package")
    out = tmp_path / "result.json"
    assert command.main(["--devices", "v5e", "--out", str(out)]) == 1
    assert "nothing was compiled for TPU v5e: it needs a package" in capsys.readouterr().out
    assert '"absent": {"v5e": "a package"}' in out.read_text()
