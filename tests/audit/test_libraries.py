"""Audits of libraries: transformers as it is installed, and a fake that agrees, differs, breaks."""

from __future__ import annotations

import sys
import tomllib
import types
from collections import Counter
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from audit_libraries import page

import posenc
from posenc.audit import CannotExpressError, Record, exit_status, libraries
from posenc.audit.adapters import (
    bias_of_keys,
    candidate,
    causal_alibi,
    lacking,
    row_of,
    square_of,
)
from posenc.audit.libraries import audit_libraries

ROOT = Path(__file__).resolve().parents[2]
FAKE = "numpy"  # a package that is installed, whose name the fake adapter takes


@pytest.fixture
def known(monkeypatch):
    """Sets the known libraries: names and adapters, which are functions or other targets."""

    def setting(**adapters):
        entries = []
        for name, adapter in adapters.items():
            target = adapter
            if callable(adapter):
                module = types.ModuleType(f"fake_{name}")
                module.candidates = adapter
                monkeypatch.setitem(sys.modules, module.__name__, module)
                target = f"{module.__name__}:candidates"
            entries.append(EntryPoint(name.replace("_", "-"), target, libraries.GROUP))
        monkeypatch.setattr(libraries, "entry_points", lambda group: entries)

    return setting


def rope(turn):
    """A candidate whose rotation is ``turn(scheme, x, pos)``."""

    def make(sizes):
        scheme = posenc.RoPE(sizes.head_dim)
        return lambda x, pos: turn(scheme, x, pos)

    return candidate(
        FAKE, turn.__name__, "rope", "rotation", make, framework="numpy", differentiable=False
    )


def right(scheme, x, pos):
    return posenc.transform(scheme, x, pos, role="query")


def counts_from_zero(scheme, x, pos):
    at = np.broadcast_to(np.arange(x.shape[2]), pos.shape)
    return posenc.transform(scheme, x, at, role="query")


def has_no_rows(scheme, x, pos):
    row_of(pos, in_order=False)
    return right(scheme, x, pos)


def lacks_an_option(scheme, x, pos):
    raise CannotExpressError("it has no such option")


def breaks(scheme, x, pos):
    raise AttributeError("gone in version 9")


def statuses(records, subject):
    return Counter(r.status for r in records if r.subject == subject)


def test_a_library_of_another_package_agrees_differs_cannot_and_breaks(known):
    turns = (right, counts_from_zero, has_no_rows, lacks_an_option, breaks)
    known(numpy=lambda grid: [rope(turn) for turn in turns])
    records = audit_libraries(["numpy"], "ci")
    assert set(statuses(records, "right")) == {"agrees"}
    assert set(statuses(records, "counts_from_zero")) == {"agrees", "differs"}
    assert set(statuses(records, "has_no_rows")) == {"agrees", "cannot express"}
    assert set(statuses(records, "breaks")) == {"not called"}
    (lacking,) = (r for r in records if r.subject == "lacks_an_option")
    assert (lacking.status, lacking.check) == ("cannot express", "every check")
    assert lacking.message == "it has no such option"
    assert {r.version for r in records} == {np.__version__}
    assert exit_status(records) == 1


def test_a_difference_comes_with_a_line_that_shows_it(known, capsys):
    known(numpy=lambda grid: [rope(counts_from_zero)])
    found = next(r for r in audit_libraries(["numpy"], "ci") if r.status == "differs")
    exec(found.reproducer, {})
    assert capsys.readouterr().out.strip() == f"differs: {found.message}"


def test_an_adapter_that_breaks_is_a_record_and_the_others_go_on(known):
    def stops(grid):
        yield rope(right)
        raise TypeError("an argument of version 9")

    def cannot_make(grid):
        def make(sizes):
            raise ValueError("no such configuration")

        yield candidate(FAKE, "made", "rope", "rotation", make, framework="numpy")

    known(numpy=stops, pytest=cannot_make, ruff="no_such_module:candidates")
    records = audit_libraries(["numpy", "pytest", "ruff"], "ci")
    last = next(r for r in records if r.status == "not called" and r.library == "numpy")
    assert "TypeError: an argument of version 9" in last.message
    assert statuses(records, "right")["agrees"] > 5
    assert set(statuses(records, "made")) == {"not called"}
    assert records[-1].library == "ruff"
    assert records[-1].status == "not installed"
    assert "no_such_module" in records[-1].message


def test_an_adapter_without_candidates_is_not_taken_for_agreement(known):
    known(numpy=lambda grid: [])
    (record,) = audit_libraries(["numpy"], "ci")
    assert record.status == "not called"
    assert exit_status([record]) == 2


def test_what_is_not_installed_is_a_row(known):
    known(**{"no_such_library_of_posenc": "nowhere:candidates"})
    records = audit_libraries(grid="ci")
    names = ["no-such-library-of-posenc", *libraries.NEEDS_GPU]
    assert [r.library for r in records] == names
    assert {r.status for r in records} == {"not installed"}
    assert "it needs a GPU" in records[-1].message


def test_unknown_names_are_errors_that_name_the_nearest(known):
    known(x_transformers="nowhere:candidates")
    with pytest.raises(ValueError, match=r"library 'x_transformers' \(did you mean 'x-transform"):
        audit_libraries(["x_transformers"])
    with pytest.raises(ValueError, match=r"unknown grid 'small'.*accepted: full, ci"):
        audit_libraries(["x-transformers"], "small")


def test_every_adapter_of_pyproject_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"][libraries.GROUP]
    assert "transformers" in entries
    for name, target in entries.items():
        module, _, function = target.partition(":")
        place = Path(*module.split(".")).with_suffix(".py")
        files = [folder / place for folder in (ROOT, ROOT / "backends")]
        (source,) = (file.read_text() for file in files if file.exists())
        assert f"def {function}(grid: str)" in source, name


def test_positions_that_a_library_cannot_take():
    assert row_of([[3, 5, 9], [3, 5, 9]]).tolist() == [3, 5, 9]
    assert row_of([[5, 3]], in_order=False).tolist() == [5, 3]
    assert square_of([3, 4], [0, 1, 2, 3, 4]) == (2, 5)
    for positions in ([[0, 1], [1, 2]], [[0, 0]], [[2, 1]]):
        with pytest.raises(CannotExpressError):
            row_of(positions)
    for q, k in (([0, 1], [0, 1, 2]), ([1], [1]), ([0, 2], [0, 2])):
        with pytest.raises(CannotExpressError):
            square_of(q, k)


@pytest.mark.parametrize("origin", ["first", "last"])
def test_a_bias_of_keys_alone_is_a_line_but_not_a_rounded_one(origin):
    slopes = np.float32(2.0) ** -np.arange(1, 4, dtype=np.float32) * np.float32(0.7)

    def build(heads, length):
        at = np.arange(length) - (0 if origin == "first" else length - 1)
        return np.float32(slopes[:, None] * np.float32(at))

    at = np.arange(100_000, 100_009)
    expected = np.float64(slopes)[:, None, None] * (at - at[:, None])
    assert np.allclose(bias_of_keys(build)(3, at, at), expected, rtol=1e-6, atol=0)
    coarse = bias_of_keys(lambda heads, length: np.float16(build(heads, length) / 64) * 64.0)
    assert np.max(np.abs(coarse(3, at, at) - expected)) > 1e-3


def test_causal_alibi_goes_on_as_a_line():
    from posenc.audit import Sizes

    scheme = causal_alibi(Sizes(12, 8, 16))
    at = np.arange(9)
    bias = posenc.bias(scheme, at, at, posenc.init_params(scheme, 0))
    slopes = np.asarray(posenc.ALiBi(12).head_slopes())[:, None, None]
    assert np.allclose(bias, slopes * (at - at[:, None]), rtol=1e-6)


# What transformers computes is not ours to test, and a release of it may break nothing here. So
# these look at what has been so for years, and at what the adapter finds of it.


def found_of_transformers(part, path="eager"):
    module = pytest.importorskip("posenc_torch.audit.transformers", reason="torch is optional")
    for each in module.candidates("ci"):
        if part in each.subject and each.path == path:
            return libraries._candidate(each, "ci")
    raise AssertionError(f"no candidate {part!r}, {path!r}")


@pytest.mark.parametrize("path", ["eager", "from_pretrained"])
def test_the_rotation_of_llama_is_that_of_the_definition(path):
    records = found_of_transformers("llama", path)
    assert {r.dtype for r in records} == {"float32", "bfloat16", "float16"}
    assert {r.status for r in records} == {"agrees"}


def test_the_adapter_of_transformers_sees_a_wrong_layout(monkeypatch):
    module = pytest.importorskip("transformers.models.llama.modeling_llama", reason="optional")
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere", reason="optional")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", cohere.apply_rotary_pos_emb)
    assert "differs" in {r.status for r in found_of_transformers("llama")}


@pytest.mark.long
@pytest.mark.parametrize(
    "part",
    [
        "bloom", "_relative_position_bucket", "gpt_oss", "deberta_v2", "wav2vec2", "deepseek_v3",
        "qwen3_vl", "llama4", "whisper",
    ],
)  # fmt: skip
def test_other_schemes_of_transformers(part):
    """Of a release that has no such function there is a record, and no exception."""
    found = Counter(r.status for r in found_of_transformers(part))
    assert found["agrees"] > 5 or found["not called"]


def test_cached_keys_of_transformers_keep_the_angles_of_a_shorter_text():
    for each in libraries.candidates("transformers", "ci"):
        if each.path.startswith("cached") and "dynamic" in each.label:
            found = {r.check for r in libraries._candidate(each, "ci") if r.status == "differs"}
            assert found == {"far positions"}
            return
    raise AssertionError("no such candidate")


def test_a_row_for_a_scheme_that_posenc_lacks(known):
    known(numpy=lambda grid: [lacking(FAKE, "a.Network", "posenc has no such scheme")])
    (row,) = audit_libraries(["numpy"], "ci")
    assert (row.status, row.message) == ("cannot express", "posenc has no such scheme")
    assert (row.check, row.scheme) == ("every check", "")


def record(library, subject, scheme, status, **more):
    return Record(library, subject, scheme, "far positions", status, version="9.1", **more)


def test_the_page_explains_what_differs_and_says_what_was_mended():
    gym = record(
        "attn-gym", "generate_alibi_bias(H)", "alibi", "differs", where={"position": 33},
        error=3.0, message="Its slopes are geometric.", reproducer="f = 1",
    )  # fmt: skip
    new = record("mlx", "nn.RoPE", "rope", "differs", message="It turns back.", error=2.0)
    fine = record("equinox", "RotaryPositionalEmbedding", "rope", "agrees")
    absent = Record("tokamax", "tokamax", "", "library", "not installed", message="tokamax is not")
    text = page([gym, new, fine, absent], "ci")
    row = next(line for line in text.splitlines() if line.startswith("| attn-gym 9.1"))
    assert row.endswith("**differs** in 1 of 1 checks, from position 33, by up to 3 |")
    assert "Not in equinox 9.1: it was mended." in text
    assert "### KerasHub" not in text  # it was not audited
    assert "| KerasHub's dynamic divides every frequency | keras-hub was not audited |" in text
    assert "attn-gym 9.1: **differs** in 1 of 1 checks" in text
    known, _, rest = text.partition("### Not explained yet")
    assert "45 times less" in known
    assert "f = 1" in known
    assert "It turns back." in rest
    assert "## Not installed\n\ntokamax is not." in rest
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 100
