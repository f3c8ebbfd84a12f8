"""The sources of the site, without Sphinx: every public name and every scheme has its page, what
pages show runs, and numbers are those of the records. ``.ci/docs`` builds the site.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from frameworks_installed import require
from sample import long

import posenc

DOCS = Path(__file__).parents[2] / "docs"
OPTIONAL = ("torch", "jax", "transformers")
SLOW = re.compile(r"^(from|import) (jax|transformers)\b", re.MULTILINE)
NOT_PUBLIC = {  # rooms with an __all__ for the others, which docs/design.md calls changeable
    "posenc.apply", "posenc.attn", "posenc.cli", "posenc.contract",
}  # fmt: skip


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(DOCS / "_site"))
    try:
        yield importlib.import_module("api_pages"), importlib.import_module("scheme_pages")
    finally:
        sys.path.remove(str(DOCS / "_site"))


def snippets(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    return [  # JAX compiles, and transformers is slow to import
        pytest.param(page, block, id=f"{page}-{n}", marks=[long] * bool(SLOW.search(block)))
        for n, block in enumerate(blocks)
    ]


# test_readme.py runs those of pytorch, jax and tokens. Other pages have tests of their own,
# of files that follow from one another; test_audit_page.py has the functions that a reader of
# audit.md has.
ALONE = ["asked.md", "hf.md", "probe.md"]


@pytest.mark.parametrize(("page", "block"), [each for page in ALONE for each in snippets(page)])
def test_snippets_of_pages_run(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = [n for n in OPTIONAL if re.search(rf"^(from|import) {n}\b", block, re.MULTILINE)]
    for name in needed:
        there = require(name) if name in ("torch", "jax") else find_spec(name)
        if not there:
            pytest.skip(f"not installed: {name}")
    if '"folder"' in block:
        a_model_in("folder")
    exec(compile(block, page, "exec"), {"__name__": "page"})


def a_model_in(folder):
    """A reader's own checkpoint: a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **sizes)).save_pretrained(folder)


def public_modules():
    """Packages of posenc with an ``__all__``, and its public modules."""
    names = {"posenc", *(f"posenc.{name}" for name in posenc.__dir__() if "_" not in name)}
    names &= {m.name for m in pkgutil.walk_packages(posenc.__path__, "posenc.")} | {"posenc"}
    found = {
        m.name for m in pkgutil.iter_modules(posenc.__path__, "posenc.")
        if m.ispkg and hasattr(importlib.import_module(m.name), "__all__")
    }  # fmt: skip
    return (found | names) - NOT_PUBLIC


def test_modules_that_the_design_calls_public_are_in_the_reference(site):
    api, _ = site
    section = (DOCS / "design.md").read_text("utf-8").partition("## Public names")[2]
    cells = re.findall(r"^\| (`posenc.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = set(re.findall(r"`([\w.]+)`", " ".join(cells)))
    assert len(named) > 10
    assert named - set(api.MODULES) - set(api.OF_LIBRARIES) == set()


def test_every_public_name_is_in_the_reference(site):
    if not (require("torch") and require("jax") and find_spec("transformers")):
        pytest.skip("needs torch, JAX and transformers")
    api, _ = site
    pages = api.pages()
    having = {
        name for name in public_modules() if hasattr(importlib.import_module(name), "__all__")
    }
    assert not having - set(api.MODULES)
    for name in api.MODULES:
        described = set(re.findall(r"^\.\. (?:py:|auto)\w+:: ([\w.]+)$", pages[name], re.M))
        described = {each.removeprefix(f"{name}.") for each in described} - {name}
        assert described == set(importlib.import_module(name).__all__), name
        assert f"[`{name}`]({name}.md)" in pages["index"]


def test_every_scheme_has_a_formula_and_conventions(site):
    _, schemes = site
    assert set(schemes.facts()) == set(schemes.names()) == set(posenc.catalogue())
    for name, fact in schemes.facts().items():
        assert {"title", "formula", "conventions"} == set(fact), name
        assert fact["conventions"], name


def test_pages_of_schemes(site, monkeypatch):
    _, schemes = site
    none = {name: {"PyTorch": {}, "JAX": {}} for name in schemes.names()}
    monkeypatch.setattr(sys.modules["scheme_implementations"], "answers_of_all", lambda: none)
    rows = {row.name: row for row in schemes.catalogue_list.rows()}
    index = schemes.index(list(rows.values()))
    for name, row in rows.items():
        page = schemes.page(name, row)
        assert f"({name}.md)" in index
        assert (DOCS.parent / schemes.source_of(name)).is_file()
        (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        exec(compile(code, f"{name}.md", "exec"), {})
    rope = schemes.page("rope", rows["rope"])
    text = (DOCS / "atlas.md").read_text("utf-8").partition("<!-- losses -->")[2]
    assert re.search(r"^\| rope \|.*$", text, re.MULTILINE)[0] in rope
    assert "tasks.md#passkeysharedtrue" in rope
    assert "arxiv.org/abs/2104.09864" in rope
    measured = json.loads((DOCS / "costs.json").read_text("utf-8"))
    for framework, one in (("PyTorch, eager", "torch"), ("JAX, `jit`", "jax")):
        (name, cost), *_ = measured["alibi"][one].items()
        row = rf"^\| {framework} \| `{name}`.* \| {cost['forward']} \| {cost['step']} \|"
        assert re.search(row, schemes.page("alibi", rows["alibi"]), re.MULTILINE)


def test_numbers_of_the_choice_are_those_of_the_records():
    page = (DOCS / "choosing.md").read_text("utf-8")
    names = ["compare.md", "atlas.md", "tasks.md", "extension.md", "tuning.md", "performance.md"]
    names += ["measurements.md"] * (DOCS / "measurements.md").exists()
    records = "".join((DOCS / name).read_text("utf-8") for name in names)
    numbers = re.findall(r"\d\.\d{3}(?: ± [\d.]+)?", page)
    assert len(numbers) > 60
    assert [number for number in numbers if number not in records] == []


def test_links_between_pages_lead_somewhere():
    made = re.compile(r"(schemes|api)/")  # by the build
    for path in DOCS.glob("*.md"):
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
        absent = [
            link for link in links if not made.match(link) and not (path.parent / link).exists()
        ]
        lead = ["get_started.md", "pytorch.md", "jax.md", "implementations.md"]
        assert [link for link in absent if link not in lead] == [], path.name
