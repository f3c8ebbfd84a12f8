"""``benchmarks/pallas_without_device.py``: what it reads in a compiled kernel, and its arithmetic.

That kernels compile is its own to say: it takes minutes, and compilers that tests do not need.
"""

import os
import sys
from pathlib import Path

import fused_by_definition
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("posenc_jax")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import pallas_without_device as without  # noqa: E402

from posenc_jax.fused import implementation  # noqa: E402
from posenc_jax.fused.target import Target, targeting  # noqa: E402

# A loop as compilers leave it: turned round, two waits in it, and what is rare moved behind it.
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


def test_a_loop_is_the_shortest_way_round():
    ops = without._loop(PTX[PTX.index(".version") : PTX.index("ptxas")])
    assert sum(op.startswith("ex2") for op in ops) == 33
    assert sum(map(without._multiplies, ops)) == 2
    assert not any(op.startswith(("selp", "mov", "ret")) for op in ops)
    # Both waits, what sets p for a product, the way to what is rare, and the end of the loop.
    assert len(ops) == 33 + 40 + 2 + 2 * len(WAIT) + 1 + 1 + 2
    assert sorted(op for op in ops if op in WAIT) == sorted(2 * WAIT)


def test_counts_are_for_each_score(monkeypatch):
    monkeypatch.setattr(without, "_disassembled", lambda ptx: None)
    counted = without._of_loop(PTX)
    assert counted == {
        "instructions": round(83 / 32, 2),
        "exponentials": round(33 / 32, 3),
        "flops": 2 * 2 * 64 * 64 * 16 // (32 * 128),
        "counted in": "PTX",
    }
    assert without._of_loop("nothing was printed") == {}
    assert without._of_loop(PTX.replace("ex2", "rcp")) == {}


def test_instructions_of_the_machine_are_read_alike():
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
    ops = without._loop(text)
    assert sorted(set(ops)) == ["BRA", "HGMMA.64x128x16.F32.BF16", "MUFU.EX2"]
    assert len(ops) == 34


def test_what_has_no_loop_has_none():
    assert without._loop("add.f32 %f1, %f2, %f3;\nret;") == []
    assert without._loop("wgmma.mma_async.m64n64k16 %r1;\nret;") == []


def test_faults():
    found = {
        "kernels": {"forward": {"spills": 0}, "d_keys": {"spills": 8}},
        "temporaries": {"2048": 100, "8192": 1600},
        "errors": {"d_queries": "ValueError: no"},
    }
    assert without.faults(found) == [
        "d_queries: ValueError: no",
        "d_keys spills 8 bytes",
        "temporaries grow 4.00 times as fast as the length",
    ]
    fine = {"kernels": {"forward": {}}, "temporaries": {"2048": 100, "8192": 400}, "errors": {}}
    assert without.faults(fine) == []
    assert without.grown({"2048": 100}) is None


def test_times_are_of_what_was_counted():
    kernel = {"flops": 512, "instructions": 8.0, "exponentials": 1.0, "bytes": 2**20}
    pairs = 16 * 8192**2 / 2
    times = without.times_of(kernel, pairs, 8192, 16)
    assert times["products"] == pytest.approx(1e3 * pairs * 512 / 600e12)
    # 8 of 128 instructions a cycle are as long as 1 of 16 exponentials.
    assert times["others"] == pytest.approx(1e3 * pairs / 16 / (132 * 1.755e9))
    moved = 2**20 * (16 * 8192) / (without.BATCH * without.HEADS * without.LENGTHS[0])
    assert times["moved"] == pytest.approx(1e3 * moved / 4.8e12)
    assert times["best"] == times["products"]
    assert times["worst"] == times["products"] + times["others"]
    few = without.times_of(kernel, 1.0, 8192, 16)
    assert few["best"] == few["worst"] == few["moved"]


def test_the_share_of_blocks():
    blocks = 512 // 64
    every = without.needed_share("none", 512, 64)
    assert every == {side: pytest.approx((blocks + 1) / (2 * blocks)) for side in every}
    some = without.needed_share("alibi", 2048, 64)
    assert all(0.05 < share < 0.5 for share in some.values())


def test_rows_of_a_prediction(monkeypatch):
    share = {"queries": 0.25, "keys": 0.125}
    monkeypatch.setattr(without, "needed_share", lambda *_: share)
    kernel = {"flops": 512, "instructions": 8.0, "exponentials": 1.0, "bytes": 0}
    rows = without.predicted("alibi", {"forward": kernel, "d_keys": kernel}, 128)
    assert len(rows) == 3 * len(without.PREDICTED)
    forward, keys, step = rows[:3]
    assert forward["products, ms"] == pytest.approx(2 * keys["products, ms"], rel=1e-3)
    assert step["best, ms"] == pytest.approx(forward["best, ms"] + keys["best, ms"], rel=1e-3)
    # Half of the causal pairs, at the rate of the products.
    assert forward["speed at best"] == pytest.approx(2, rel=1e-3)
    assert "speed at best" not in keys


@pytest.mark.parametrize("form", [*without.FORMS, without.PLACED])
def test_a_kernel_alone_is_given_what_the_implementation_gives_it(form, monkeypatch):
    monkeypatch.setattr(implementation, "_module", lambda here: fused_by_definition)
    case, length = without.Case("h200", form, 64), 32
    given = without._given(case, length)
    with targeting(Target("gpu", "9.0", interpreted=True)):
        out, _ = jax.eval_shape(lambda given: without._alone(case, "forward", given), given)
        d_q, *_ = jax.eval_shape(lambda given: without._alone(case, "d_queries", given), given)
        whole, gradients = jax.eval_shape(lambda given: without._step(case, given), given)
    assert out.shape == d_q.shape == (without.BATCH, without.HEADS, length, 64)
    assert whole.shape == given["q"].shape
    (found,) = gradients
    assert {"q", "k", "v", "params"} <= set(found)
    assert ("q_features" in found) == form.startswith("gated")
    assert set(found["params"]) == set(given["params"])


def test_what_compilers_print_is_overheard(capfd):
    with without._overheard() as told:
        os.write(1, b"one\n")
        os.write(2, b"two\n")
    assert told == ["one\ntwo\n"]
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_compiler_that_is_not_there_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(without, "missing", lambda device: "a package")
    out = tmp_path / "found.json"
    assert without.main(["--devices", "v5e", "--out", str(out)]) == 1
    assert "nothing was compiled for TPU v5e: it needs a package" in capsys.readouterr().out
    assert '"absent": {"v5e": "a package"}' in out.read_text()
