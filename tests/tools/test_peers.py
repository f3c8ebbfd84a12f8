"""``benchmarks/peers.py`` with made-up peers: it checks before it times, and leaves nothing out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from frameworks_installed import require

if not (require("torch") and require("jax")):
    pytest.skip("torch or jax is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers as command  # noqa: E402
import torch  # noqa: E402
from harness.peers import jax_peers, measure, report, torch_peers  # noqa: E402
from harness.peers.side import Difference, Peer, Side, Sizes, from_peer, to_peer  # noqa: E402
from harness.run import load  # noqa: E402

import posenc  # noqa: E402
from posenc.schemes import catalogue  # noqa: E402

SMALL = Sizes(2, 8, 4)
MODULES = {"math": "math", "nowhere": "no_such_module_at_all"}


def table(change=lambda bias: bias, calls=None):
    """ALiBi's learned bias by its formula, in another layout, after a change."""

    def ready(inputs):
        leaf, at = inputs.leaf("params.slopes"), inputs.positions
        distance = (at - at[:, None]).abs()

        def call(slopes):
            if calls is not None:
                calls.append(1)
            return change(-distance[:, None] * slopes[:, None])

        return Side(call, {"params.slopes": leaf}, (1, 0, 2))

    return ready


PEER = Peer(
    "math", "alibi", "bias", "alibi(L)", table(), ("eager",), {"learned": True}
)  # fmt: skip


def measured(*peers, only="forward", rounds=3):
    plan = measure.Plan(SMALL, seconds=0.0, rounds=(rounds, rounds))
    return [
        row
        for group in measure.groups(peers, SMALL, lambda name: f" {only} " in name)
        for row in measure.rows(group, load("torch"), plan, MODULES)
    ]


@pytest.mark.parametrize("only", ["forward", "step"])
def test_equal_peers_are_measured_in_the_same_rounds(only):
    rows = measured(PEER, replace(PEER, call="again"), only=only)
    assert [row["status"] for row in rows] == ["measured", "measured"]
    assert all(row["difference"] <= row["bound"] for row in rows)
    assert rows[0]["ours, ms"] == rows[1]["ours, ms"]  # one run for all
    assert {row["ratio"]["n"] for row in rows} == {3}


@pytest.mark.parametrize(
    "change",
    [lambda b: b * 1.01, lambda b: b + torch.nan, lambda b: b.detach() + 0 * b],
    ids=["values", "nan", "gradient"],
)
def test_what_differs_is_printed_and_not_timed(change):
    calls = []
    wrong = replace(PEER, call="wrong", ready=table(change, calls))
    right, row = measured(PEER, wrong, only="step", rounds=4)
    assert right["status"] == "measured"
    assert row["status"] == "differs"
    assert "ratio" not in row
    assert len(calls) == 1  # the check
    assert "differs from posenc's by" in report.line(row)


def test_a_difference_with_a_reason_has_a_bound_too():
    ready = table(lambda bias: bias * 1.0001)
    why = Difference("it rounds", lambda inputs: 2e-4)
    near = replace(PEER, ready=ready, differs=why)
    far = replace(PEER, ready=table(lambda bias: bias * 1.001), differs=why)
    assert [row["status"] for row in measured(near, far)] == ["measured", "differs"]
    assert "it rounds" in report.line(measured(near)[0])


def test_what_is_missing_or_fails_is_a_row_with_the_reason():
    def broken(inputs):
        raise RuntimeError("no kernel")

    absent = replace(PEER, library="nowhere")
    rows = measured(absent, replace(PEER, ready=broken))
    assert [row["status"] for row in rows] == ["missing", "failed"]
    assert "pip install nowhere" in report.line(rows[0])
    assert "no kernel" in report.line(rows[1])


@pytest.mark.parametrize("axes", [None, (0, 2, 1, 3), (1, 0, 3, 2), (2, 0, 1, 3)])
def test_layouts_go_there_and_back(axes):
    value = np.arange(2 * 3 * 5.0).reshape(1, 2, 3, 5)
    there = value if axes is None else value.transpose(axes)
    squeezed = there.reshape([n for n in there.shape if n != 1])
    own = to_peer(value, axes, squeezed.shape)
    np.testing.assert_array_equal(own, squeezed)
    np.testing.assert_array_equal(from_peer(own, axes, value.shape), value)


def test_every_name_of_the_catalogue_is_compared_or_has_no_peer():
    every = [*torch_peers.peers(), *jax_peers.peers()]
    compared = {peer.scheme for peer in every}
    assert compared <= set(catalogue())
    assert {peer.library for peer in every} <= set(command.MODULES)
    alone = report.without_peer(catalogue(), compared)
    assert compared | set(alone) == set(catalogue())
    assert not compared & set(alone)
    for peer in every:  # its options are options of its scheme
        posenc.make(peer.scheme, **SMALL.of_model, **peer.options_for(SMALL))


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    document, out = tmp_path / "measurements.md", tmp_path / "result.json"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    monkeypatch.setattr(command, "_DOCUMENT", document)
    monkeypatch.setattr(command, "MODULES", {**MODULES, "torch": "torch"})
    own = [PEER, replace(PEER, library="nowhere")]
    monkeypatch.setattr(torch_peers, "peers", lambda: own)
    monkeypatch.setattr(jax_peers, "peers", list)

    def run(*more):
        threads = str(torch.get_num_threads())
        return command.main(["--quick", "--threads", threads, "--out", str(out), *more])

    assert run("--write-docs") == 1  # a library is missing
    once = document.read_text()
    assert run("--allow-missing", "--write-docs") == 0
    printed = capsys.readouterr().out
    assert "pip install nowhere" in printed
    assert "no peer: alibi_2d" in printed
    twice = document.read_text()
    assert once.count("\n") == twice.count("\n")  # other times, the same rows
    assert twice.startswith("before\n")
    assert twice.endswith(f"{report.END}\nafter\n")
    assert "old" not in twice
    # Some rows again; the others stay.
    before = json.loads(out.read_text())["rows"]
    assert run("--only", "step.*math") == 0
    after = json.loads(out.read_text())["rows"]
    assert len(after) == len(before)
    assert [a == b for a, b in zip(after, before, strict=True)].count(False) <= 1
    with pytest.raises(SystemExit, match="no row matches --only nothing"):
        run("--only", "nothing")
    assert json.loads(out.read_text())["rows"] == after
    out.write_text(out.read_text().replace('"length": 64', '"length": 65'))
    with pytest.raises(ValueError, match=r"arguments are .* run all"):
        run("--only", "step")


def test_a_section_is_written_between_its_markers_only():
    document = f"a\n{report.BEGIN}{report.END}\nb\n"
    once = report.written(document, "text")
    assert report.written(once, "text") == once
    assert once.startswith("a\n")
    assert once.endswith("\nb\n")
    for wrong in ("no markers", report.BEGIN * 2 + report.END, report.END + report.BEGIN):
        with pytest.raises(ValueError, match="peers"):
            report.written(wrong, "text")
