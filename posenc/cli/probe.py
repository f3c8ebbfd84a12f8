"""``posenc probe``: a model on disk, measured by length, also under other schemes."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from posenc.cli.compare import integers
from posenc.cli.parser import Parser
from posenc.probe import report
from posenc.probe.api import make_setting, summary
from posenc.probe.cost import duration, estimate
from posenc.probe.kept import Kept
from posenc.probe.measures import Setting, rate
from posenc.probe.passkey import Source, Symbols, Words
from posenc.probe.pieces import FOLDER, Piece, Probe, carry_out, kept, make_folder
from posenc.probe.schemes import about, scheme_of, taken
from posenc.probe.text import Text, read
from posenc.study.identity import posenc_digest
from posenc.study.key_bytes import CONTEXT
from posenc.study.outputs import check_folder
from posenc.study.specs import parse, split
from posenc.study.stopping import exit_status

UNTOUCHED = "untouched"  # the row of the model as it is
_EVERY = 5.0  # least seconds between two lines about one piece


def add_options(parser: Parser) -> None:
    """Add the options of ``posenc probe``."""
    parser.usage = "posenc probe MODEL --text FILE ... --eval-lens N ... [options]"
    parser.failed = "a piece failed"
    parser.examples = (
        ("posenc probe llama --text book.txt --eval-lens 512 1024 2048", ""),
        ("posenc probe llama --text book.txt --eval-lens 8192 --scheme rope_pi:factor=4", ""),
        ("posenc probe llama --text ids.npy --eval-lens 512 1024 --dry-run", ""),
    )
    add = parser.add_argument
    add(
        "model", metavar="MODEL",
        help="folder of a causal model of transformers; or a file that `posenc compare "
        "--keep-weights` wrote: OUT/weights/FILE.safetensors",
    )  # fmt: skip
    add(
        "--text", nargs="+", action="extend", metavar="FILE", required=True,
        help="files of UTF-8, or one of token ids, .npy or .bin",
    )  # fmt: skip
    add(
        "--eval-lens", nargs="+", action="extend", type=integers, metavar="N", required=True,
        help="lengths of windows in tokens; best all divide the longest",
    )  # fmt: skip
    add(
        "--scheme", action="append", default=[], metavar="SCHEME",
        help="the same weights under this scheme too, as rope_yarn:factor=4; may be given again; "
        "options that stand in the model's configuration, such as base, are taken from it",
    )  # fmt: skip
    add("--out", default="posenc-probe", metavar="DIR", help="results (default: posenc-probe)")
    add("--windows", type=int, metavar="N", help="stretches of text (default: at most 16)")
    add(
        "--keys", type=int, default=4, metavar="N",
        help="passkeys of each depth and length, 0 for none (default: 4)",
    )  # fmt: skip
    add("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, ... (default: auto)")
    add(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="of weights (default: bfloat16 on a GPU, else float32)",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="say what it will cost, and stop")
    add = parser.rare("measuring").add_argument
    add("--depths", type=int, default=10, metavar="N", help="depths of a passkey (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="of passkeys (default: 0)")
    add(
        "--attention-len", type=int, metavar="N",
        help="tokens whose attention is measured; 0 for none (default: the shortest length)",
    )  # fmt: skip
    add("--batch-size", type=int, metavar="N", help="windows at once (default: by free memory)")


def run(options: dict[str, Any]) -> int:
    """Measure, write tables, figures and the report, and return the exit status."""
    labels = _labels(options["scheme"])
    out = Path(options["out"])
    check_folder(out)
    model = _model(options)
    text, source = _text(model, options["text"])
    setting = _setting(model, text, options)
    schemes = {label: scheme_of(label, _sizes(model, setting), model.ropes()) for label in labels}
    facts = {**model.facts(), "posenc": _code(model)}
    rows = {UNTOUCHED: None} | {label: about(scheme) for label, scheme in schemes.items()}
    probe = Probe(rows, text, source, setting, facts)
    folder = out / FOLDER
    records = kept(probe.pieces(), folder)
    have = {record["run"] for record in records}
    missing = [piece for piece in probe.pieces() if piece.run not in have]
    notes = _notes(model, text, schemes, setting)

    def subject_of(row: str) -> Any:
        return model.use(schemes.get(row))

    if missing:
        model.load()
        for label in labels:  # a scheme that does not fit is an error before any work
            subject_of(label)
            if arrays := model.untrained():
                notes.append(f"{label}: the learned arrays {', '.join(arrays)} have first values.")
        _say_cost(probe, missing, subject_of, len(records), model)
    else:
        print(f"all {len(records)} pieces are in {folder}")
    if options["dry_run"]:
        return 0
    make_folder(out)
    notes += model.notes
    versions = {**facts, "folder": str(model.folder), "device": model.device_name}
    title = f"{model.folder.resolve().name} by length"
    status = 0
    begin = time.monotonic()
    try:
        progress = _Progress(probe)
        for record in carry_out(probe, missing, subject_of, folder, progress.step):
            progress.result(record)
            records.append(record)
    except KeyboardInterrupt as stop:
        status = exit_status(stop)
        print("\nstopped; the same command continues from here")
    place = {piece.run: n for n, piece in enumerate(probe.pieces())}
    records.sort(key=lambda record: place[record["run"]])
    said = summary(probe, title=title, command=_command(options), notes=notes, versions=versions)
    _write(out, said, records, list(place), time.monotonic() - begin)
    return status or int(any(record["status"] != "ok" for record in records))


def _labels(given: Sequence[str]) -> list[str]:
    """The labels of the schemes, checked as text."""
    labels = list(split(given)) if given else []
    for label in labels:
        if "~" in label:
            raise ValueError(
                f"--scheme {label}: the weights are trained already, so give the scheme of test "
                f"time alone: {label.rpartition('~')[2]}"
            )
        parse(label)
        if labels.count(label) > 1 or label == UNTOUCHED:
            raise ValueError(f"--scheme {label} is a row already; name each once")
    return labels


def _model(options: Mapping[str, Any]) -> Any:
    """The model, without its weights."""
    if (size := options["batch_size"]) is not None and size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")
    given = {name: options[name] for name in ("device", "dtype", "batch_size")}
    if options["model"].endswith(".safetensors"):
        return Kept(options["model"], **given)
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise ImportError(f"probe needs {name}: pip install torch 'transformers>=5'")
    return importlib.import_module("posenc_torch.probe").Model(options["model"], **given)


def _text(model: Any, files: Sequence[str]) -> tuple[Text, Source]:
    """The text, and what draws passkeys."""
    has_words = model.tokenizer is not None
    text = read(
        files,
        model.encode if has_words else None,
        vocabulary=model.vocabulary,
        start=model.start,
        end=model.end,
    )
    return text, Words(model.ids, model.start) if has_words else Symbols.of(text.tokens)


def _setting(model: Any, text: Text, options: Mapping[str, Any]) -> Setting:
    """The setting; key tokens repeat after as many tokens as have about 8 bytes."""
    context = None
    if text.lengths is not None:
        per_token = float(np.sum(text.lengths)) / len(text.tokens)
        context = max(1, round(CONTEXT / per_token))
    lengths = [n for some in options["eval_lens"] for n in some]
    names = ("windows", "depths", "keys", "attention_len", "seed")
    own = {name: options[name] for name in names}
    return make_setting(text, lengths, **own, vocabulary=model.vocabulary, context=context)


def _sizes(model: Any, setting: Setting) -> dict[str, int]:
    sizes: dict[str, int] = model.sizes()
    return {**sizes, "max_len": max(setting.longest, sizes.get("train_len", 0))}


def _notes(model: Any, text: Text, schemes: Mapping[str, Any], setting: Setting) -> list[str]:
    """What a reader of the tables must know."""
    notes, trained = [], model.sizes().get("train_len")
    if trained is not None and (beyond := [n for n in setting.eval_lens if n > trained]):
        shown = ", ".join(map(str, beyond))
        notes.append(f"Longer than the model was trained for, {trained} tokens: {shown}.")
    for label, scheme in schemes.items():
        if options := taken(label, scheme, model.ropes()):
            notes.append(f"{label}: {options}, as in the model's configuration.")
    if text.start is not None:
        notes.append(f"The first token of every window is {text.start}, as the tokenizer has it.")
    if text.lengths is None:
        notes.append("Bits are per token: how many bytes a token covers is not known.")
    return notes


def _code(model: Any) -> str:
    """A digest of the code that decides the numbers."""
    total = hashlib.sha256(posenc_digest(model.backend).encode())
    own = Path(report.__file__).parent
    for file in (*sorted(own.glob("*.py")), Path(inspect.getfile(type(model)))):
        if file.name not in ("cost.py", "figures.py", "report.py", "tables.py"):
            total.update(file.read_bytes())
    return total.hexdigest()


def _say_cost(
    probe: Probe,
    missing: Sequence[Piece],
    subject_of: Callable[[str], Any],
    done: int,
    model: Any,
) -> None:
    rows = len(probe.rows)
    setting = probe.setting
    print(
        f"{rows} row{'s' * (rows > 1)}, {setting.windows} stretches of {setting.longest:,} tokens, "
        f"{model.dtype} on {model.device_name}"
    )
    sizes = ", ".join(f"{model.batch_size(n)} of {n}" for n in setting.eval_lens)
    print(f"windows at once: {sizes} (about {model.bytes_per_token() / 1024:,.0f} KiB per token)")
    if done:
        print(f"{done} of {done + len(missing)} pieces are there from before")
    print("timing a first batch ...", flush=True)
    print(
        f"{len(missing)} pieces: about {duration(estimate(probe, missing, subject_of))}", flush=True
    )


class _Progress:
    """A line for every piece, and now and then one for a long piece."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self._said = probe, time.monotonic()

    def step(self, piece: Piece, done: int) -> None:
        """So many windows of a piece are done."""
        if time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            every = self._probe.windows(piece)
            print(
                f"  {piece.row}  {piece.measure} at {piece.length}: {done} of {every}", flush=True
            )

    def result(self, record: Mapping[str, Any]) -> None:
        """A piece ended."""
        self._said = time.monotonic()
        name = f"{record['scheme']}  {record['measure']} at {record['length']}"
        print(f"{name}: {_result(record)}, {duration(record['seconds'])}", flush=True)


def _result(record: Mapping[str, Any]) -> str:
    if record["status"] != "ok":
        return f"failed: {record['error']}"
    if record["measure"] == "text":
        return f"{rate(record, 'bits'):.3f} bits per token"
    if "why" in record:
        return f"none: {record['why']}"
    if record["measure"] == "passkey":
        return f"{np.mean(record['right']):.2f} of keys"
    return f"mean distance {np.mean(record['distances']):.1f} tokens"


def _write(
    out: Path,
    said: dict[str, Any],
    records: list[dict[str, Any]],
    runs: Sequence[str],
    seconds: float,
) -> None:
    if not any(record["status"] == "ok" for record in records):
        print("every piece failed" if records else "no piece has finished yet")
        return
    names, earlier = report.write(out, said, records, runs)
    if earlier is not None:
        print(f"the files of an earlier study are now in {earlier}")
    print(f"\n{report.text(said, records, max(40, shutil.get_terminal_size().columns))}")
    print(f"\n{duration(seconds)}; wrote")
    for name in names:
        print(f"  {out / name}")


def _command(options: Mapping[str, Any]) -> str:
    """The command that repeats this probe: every option that differs from its default."""
    parser = Parser()
    add_options(parser)
    words = ["posenc", "probe", options["model"]]
    for action in parser._actions:
        value = options.get(action.dest)
        if not action.option_strings or value in (None, action.default, False):
            continue
        many = value if isinstance(value, list) else [value]
        flat = [str(n) for some in many for n in (some if isinstance(some, list) else [some])]
        name = action.option_strings[0]
        if action.dest == "scheme":
            words += [word for label in flat for word in (name, label)]
        else:
            words += [name, *flat]
    return shlex.join(words)
