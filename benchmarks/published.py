"""asv plugin: what ``asv publish`` writes opens from disk; without other results, the kept history.

asv's pages load scripts from the network; these come from Python packages (extra ``bench``). They
ask for JSON by XMLHttpRequest, which browsers refuse to a page on disk; ``data.js`` holds it, and
``from_disk.js`` answers.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from asv.commands.publish import Publish
from asv.console import log
from history import KEPT

HERE = Path(__file__).resolve().parent
_PACKAGES = ("js.jquery", "js.jquery_flot", "js.bootstrap")
# from_disk.js does what asv needs of them.
_REPLACED = {"jquery.flot.orderBars.js", "stupidtable.min.js", "md5.min.js"}
_TAG = re.compile(r'<script src="https:([^"]+)".*?</script>|<link [^>]*href="https:([^"]+)".*?>')


def setup() -> None:
    """Extend ``asv publish``. asv calls this when it loads the plugin.

    A publisher, asv's own point of extension, runs before the index is written.
    """
    publish = Publish.run.__func__

    def run(cls, conf, *args, **options):
        add_kept(Path(conf.results_dir))
        publish(cls, conf, *args, **options)
        from_disk(Path(conf.html_dir))

    Publish.run = classmethod(run)


def add_kept(results: Path) -> None:
    """Copy the history that the repository keeps to where asv looks for results.

    Not beside results of another machine: asv's grid would join both to one line, and the
    difference of the machines would look like a change.
    """
    kept = {file.parent.name for file in KEPT.glob("*/machine.json")}
    own = {file.parent.name for file in results.glob("*/machine.json")} - kept
    if own:
        _remove_copies(results)
    elif KEPT.exists():
        shutil.copytree(KEPT, results, dirs_exist_ok=True, copy_function=_copy)


def _remove_copies(results: Path) -> None:
    """Remove what an earlier call copied: files that are those of the repository, to the byte."""
    for source in KEPT.glob("*/*.json"):
        copy = results / source.relative_to(KEPT)
        if copy.exists() and copy.read_bytes() == source.read_bytes():
            copy.unlink()


def _copy(source: str, target: str) -> None:
    """``benchmarks.json`` describes the suite that ran last: never by an older one."""
    if not (Path(target).exists() and Path(target).name == "benchmarks.json"):
        shutil.copyfile(source, target)


def from_disk(folder: Path) -> None:
    """Let the pages in a folder load nothing from elsewhere."""
    try:
        scripts = {_plain(path.name): path.locate() for name in _PACKAGES for path in files(name)}
    except PackageNotFoundError as missing:
        log.warning(f"asv's pages will need the network: install posenc[bench]; {missing}")
        return
    data = {
        path.relative_to(folder).as_posix(): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob("*.json"))
    }
    (folder / "data.js").write_text(f"const asvFiles = {json.dumps(data)};\n", encoding="utf-8")
    shutil.copy(HERE / "from_disk.js", folder)

    def local(tag: re.Match[str]) -> str:
        name = _plain((tag[1] or tag[2]).rpartition("/")[2])
        if name in _REPLACED:
            return ""
        if name not in scripts:
            log.warning(f"asv's pages will need the network: {_PACKAGES} lack {name}")
            return tag[0]
        shutil.copyfile(scripts[name], folder / name)
        return f'<script src="{name}"></script>' if tag[1] else _STYLE.format(name)

    index = folder / "index.html"
    page = _TAG.sub(local, index.read_text(encoding="utf-8"))
    page = page.replace("</head>", f"{_DATA}\n  </head>", 1)
    index.write_text(page, encoding="utf-8")


def _plain(name: str) -> str:
    """``jquery-3.3.1.min.js`` -> ``jquery.min.js``."""
    return re.sub(r"-[\d.]+(?=\.(min|slim)\.)", "", name)


_STYLE = '<link rel="stylesheet" href="{}">'
_DATA = '<script src="data.js"></script>\n    <script src="from_disk.js"></script>'
