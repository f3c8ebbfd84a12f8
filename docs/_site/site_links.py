"""Links of pages to files of the repository, which work on GitHub, made to work on the site.

A link to a scheme's file leads to the scheme's page. A link to another file leads to it at the
address that ``pyproject.toml`` names as the project's source, or without one to a copy in the site.
"""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from scheme_facts import pages_of_files
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]


def setup(app: Sphinx) -> dict[str, Any]:
    """Mend links after a page was parsed, before copies of files are gathered."""
    app.connect("doctree-read", _mend, priority=100)
    app.connect("source-read", _folders)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@cache
def source_url() -> str | None:
    """The address of a file in the repository, up to its path; None if none is named."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    named = {name.lower(): url.rstrip("/") for name, url in urls.items()}
    found = next((named[n] for n in ("source", "repository", "homepage") if n in named), None)
    return found and f"{found}/blob/main/"


def _mend(app: Sphinx, doctree: nodes.document) -> None:
    page = Path(app.env.doc2path(app.env.docname))
    for node in list(doctree.findall(addnodes.download_reference)):
        target = (page.parent / str(node["reftarget"])).resolve()
        if not target.is_relative_to(ROOT):
            continue
        path = target.relative_to(ROOT).as_posix()
        scheme = pages_of_files().get(path)
        if scheme is not None and page.parent.name != "schemes":
            up = os.path.relpath(page.parents[0].parent / "docs" / "schemes", page.parent)
            uri = f"{Path(up).as_posix()}/{scheme}.html"
        elif source_url() is not None:
            uri = f"{source_url()}{path}"
        else:
            continue
        link = nodes.reference("", "", *node.children, refuri=uri, internal=scheme is not None)
        node.replace_self(link)


def _folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder has no copy: it is text, or a link to the repository."""
    import re

    def text(match: re.Match[str]) -> str:
        where = (Path(app.srcdir) / docname).parent / match[2]
        if not where.is_dir():
            return match[0]
        path = where.resolve().relative_to(ROOT).as_posix()
        return f"[{match[1]}]({source_url()}{path})" if source_url() else match[1]

    source[0] = re.sub(r"\[([^\]\n]*)\]\((\.\./[^)\s]*)\)", text, source[0])
