"""``docs/costs.py`` and what it measured: ratios, and a reason where there is none."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from frameworks_installed import require

import posenc

DATA = json.loads((Path(__file__).parents[2] / "docs" / "costs.json").read_text("utf-8"))


@pytest.fixture
def costs(monkeypatch):
    if not (require("torch") and require("jax")):
        pytest.skip("needs torch and JAX")
    import costs

    sizes = {"num_heads": 2, "head_dim": 8, "dim": 16, "hidden_dim": 16, "max_len": 16}
    for name, value in {"HEADS": 2, "DIM": 8, "LENGTH": 16, "TURNS": 1}.items():
        monkeypatch.setattr(costs, name, value)
    monkeypatch.setattr(costs, "SIZES", sizes | {"train_len": 8})
    return costs


def test_a_ratio_is_one_of_medians_after_a_first_turn(costs, monkeypatch):
    now, spent = [0.0], {"plain": iter([90, 2, 4, 50]), "call": iter([1, 6, 3, 70])}

    def call(name):
        return lambda: now.__setitem__(0, now[0] + next(spent[name]))

    monkeypatch.setattr(costs, "TURNS", 3)
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    assert costs.ratios(call("plain"), [call("call")]) == [1.5]


@pytest.mark.parametrize("side", ["Torch", pytest.param("Jax", marks=pytest.mark.long)])
def test_implementations_that_serve_are_measured(costs, side):
    found = costs.costs(getattr(costs, side)("alibi"))
    (chosen,) = (one for one, cost in found.items() if cost.get("auto"))
    assert found[chosen]["forward"] > 0
    assert found[chosen]["step"] > 0
    assert ("memory of step" in found[chosen]) == (side == "Jax")
    assert "chunked" in found
    assert "pallas" not in found


def test_a_step_that_cannot_be_differentiated_says_so(costs):
    class Stub(costs.Torch):
        def calls(self, implementation):
            calls = super().calls(implementation)
            if implementation == "chunked":
                calls["step"] = self.refuse
            return calls

        def refuse(self):
            raise RuntimeError("no backward pass\nmore lines")

    cost = costs.costs(Stub("alibi"))["chunked"]
    assert cost["step"] == "not measured: no backward pass"
    assert cost["forward"] > 0


def test_every_record_is_a_number_or_says_why_not():
    assert set(DATA) <= set(posenc.catalogue())
    assert "alibi" in DATA
    for name, record in DATA.items():
        assert set(record) == {"torch", "jax", "measured"}
        for found in (record["torch"], record["jax"]):
            assert sum(cost.get("auto", False) for cost in found.values()) == 1, name
            for cost in found.values():
                each = [cost["why"]] if "why" in cost else [cost["forward"], cost["step"]]
                assert all(
                    0 < one < 1000 if isinstance(one, float) else one.startswith("not measured: ")
                    for one in each
                ), (name, cost)
