"""``python docs/_site/check.py site``: what Sphinx does not check of the site that it made.

Pages load nothing from elsewhere, formulas are MathML, and links to files and anchors lead there.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src"}


class Page(HTMLParser):
    """What a page loads, what it links to, its anchors, and whether a formula was left as text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.formulas = 0
        text = path.read_text(encoding="utf-8")
        self.addresses = " at 0x" in re.sub(r"<[^>]*>", "", text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.formulas += tag == "math"
        if tag in LOADING and given.get("rel") != "canonical":
            self.loads.append(given.get(LOADING[tag], ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


def faults(site: Path) -> list[str]:
    """What is wrong, one line each."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        found += [f"{name} loads {u}" for u in page.loads if urlsplit(u).netloc]
        if name.startswith("_modules/"):  # made by Sphinx
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                found.append(f"{name} links to {link}, which is not there")
            elif target in pages and parts.fragment:
                there = unquote(parts.fragment) in pages[target].anchors
                found += [] if there else [f"{name} links to {link}, an anchor not there"]
        if name.startswith("api/") and page.addresses:
            found.append(f"{name} shows addresses of memory: a default without a name")
        if name.startswith("schemes/") and name != "schemes/index.html" and not page.formulas:
            found.append(f"{name} has no formula")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
