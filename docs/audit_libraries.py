"""Write the page of what other libraries compute.

Run ``python docs/audit_libraries.py`` after ``pip install -e '.[peers]'``, ``pip install --no-deps
keras-hub`` and what else of ``posenc.audit.libraries.libraries()`` is wanted. ``FOLDER`` gets the
page in place of ``docs``. The explanations below were checked by hand against the library's source;
a difference that has none says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from posenc.audit.libraries import audit_libraries
from posenc.audit.record import Record

PAGE = "audit_libraries.md"


@dataclass(frozen=True)
class Explanation:
    """Why a library differs, and what shows it with nothing but the library.

    ``scheme``, ``path``, ``subject`` and ``check`` are parts of the texts of the records.
    ``shown`` is the check whose message the page has; default: the first.
    """

    title: str
    library: str
    text: str
    code: str
    scheme: str = ""
    subject: str = ""
    path: str = ""
    check: str = ""
    shown: str = ""

    def explains(self, record: Record) -> bool:
        """Whether it is about a record."""
        return (
            record.library == self.library
            and self.scheme in record.scheme
            and self.subject in record.subject
            and self.path in record.path
            and self.check in record.check
        )


EXPLANATIONS = (
    Explanation(
        "rotary-embedding-torch: positions in the dtype of the vectors", "rotary-embedding-torch",
        "`get_seq_pos` counts positions in the dtype of the vectors. bfloat16 has every integer "
        "only up to 256: past that, neighbours share a position. float16 has them up to 2048, and "
        "infinity from 65520 on, whose sine is NaN. `rotary(pos.float())` and `apply_rotary_emb` "
        "have no such rounding, and agree.",
        "RotaryEmbedding(64).get_seq_pos(4, dtype=torch.bfloat16, offset=300)"
        "\n# 300, 300, 302, 304: these are 300, 301, 302 and 303",
        scheme="rope", subject="rotate_queries_or_keys",
    ),
    Explanation(
        "Equinox: the first theta is everybody's", "equinox",
        "Cosines are held for all layers of a program by `(embedding_size, dtype)`, without "
        "`theta`: a layer whose tokens are no longer than an earlier one's gets the table of that "
        "one. In a new program the same call agrees.",
        "R = eqx.nn.RotaryPositionalEmbedding; x = jnp.ones((9, 64)); R(64)(x)"
        "\n(R(64, theta=5e5)(x) == R(64)(x)).all()  # True",
        path="after a layer",
    ),
    Explanation(
        "KerasHub: rope_type='dynamic' divides every frequency", "keras-hub",
        "Dynamic NTK raises the *base* by `factor**(D / (D - 2))`, from the length in training on "
        "(and `rope_ntk` does at every length), which keeps the highest frequency. The layer "
        "divides every *frequency* by this number: position interpolation by 4.18 for "
        "`scaling_factor=4` and 64 channels, at every length. Against the label "
        "`rope_pi:factor=4.182936592888948` it agrees.",
        "RotaryEmbedding(scaling_factor=4., rope_type='dynamic')._get_inverse_freq(64)[0]"
        "\n# 0.239; 1.0 in dynamic NTK",
        subject="dynamic", shown="packed documents",
    ),
    Explanation(
        "attention-gym: slopes of ALiBi for head counts that are no power of two", "attn-gym",
        "`generate_alibi_bias` has slopes `2**(-8h/H)` for every `H`. The paper's are those of the "
        "largest power of two up to `H`, then every second of twice as many. With 12 heads, head 9 "
        "has 0.0156 in place of 0.7071, 45 times less. Against `alibi:slopes=geometric` it agrees.",
        "generate_alibi_bias(12)(torch.zeros(()), 0, torch.tensor(8), 1, 0)"
        "\n# -0.0156; -0.7071 in the paper",
        scheme="alibi",
    ),
    Explanation(
        "mlx-lm: LongRoPE has the long factors alone", "mlx-lm",
        "`SuScaledRoPE` takes `short_factor` and keeps `long_factor`, at every length. A model "
        "of 128k tokens that is asked a short question gets the angles of a long one. Cached keys "
        "stay right past the length of training.",
        "initialize_rope(96, 1e4, False, parameters, 131072)._freqs  # those of long_factor",
        scheme="rope_longrope", shown="positions 0 to 32",
    ),
    Explanation(
        "mlx-lm: attention_factor is not read", "mlx-lm",
        "`initialize_rope` passes `mscale`, `mscale_all_dim` and the betas of YaRN, and no "
        "`attention_factor`; so the factor follows from `factor` (mlx-lm#1507).",
        "initialize_rope(64, 1e4, False, {**yarn, 'attention_factor': 1.0}).mscale  # 1.1386",
        scheme="attention_factor=1", shown="positions 0 to 32",
    ),
    Explanation(
        "mlx-lm: YaRN's truncate is not read", "mlx-lm",
        "The ends of the ramp are rounded to whole pairs, whatever `truncate` says. gpt-oss has "
        "`truncate: false`.",
        "initialize_rope(64, 1e4, False, {**yarn, 'truncate': False})  # as with True",
        scheme="truncate=False", shown="positions 0 to 32",
    ),
    Explanation(
        "mlx-lm: cached keys keep the angles of a shorter text", "mlx-lm",
        "Dynamic NTK has other frequencies for each length past that of training. A decoder that "
        "caches rotated keys has turned each by the frequencies of its own time, and scores of old "
        "and new tokens are no function of their distance (transformers#25306). A prompt at once "
        "agrees.",
        "rope = initialize_rope(64, 1e4, False, {'rope_type': 'dynamic', 'factor': 4.}, 4096)\n"
        "rope(x[:, :, :1], offset=0), rope(x[:, :, 1:], offset=8000)  # two bases",
        scheme="rope_dynamic", path="token by token",
    ),
    Explanation(
        "transformers: cached keys keep the angles of a shorter text", "transformers",
        "Dynamic NTK and LongRoPE have other frequencies past the length of training. "
        "`LlamaRotaryEmbedding` takes those of the largest position of a call, so a cache of "
        "rotated keys holds keys of several sets (transformers#25306). A prompt at once agrees.",
        "rotary(x, torch.tensor([[4095]])), rotary(x, torch.tensor([[4096]]))  # two sets",
        path="token by token",
    ),
    Explanation(
        "x-transformers: heads of keys take turns", "x-transformers",
        "`Attend` repeats key heads as `b (r kvh) n d`, so query head `h` uses key head `h % Hk`. "
        "Elsewhere it uses `h // (H / Hk)`: the heads of grouped checkpoints do not fit.",
        "repeat(k, 'b kvh n d -> b (r kvh) n d', r=4)"
        "\n# heads 0 1 0 1 0 1 0 1; elsewhere 0 0 0 0 1 1 1 1",
        check="2 key heads for 8 query heads",
    ),
    Explanation(
        "x-transformers: xPos is NaN in long texts", "x-transformers",
        "Queries are multiplied by `scale ** ((pos - length // 2) / 512)`, and keys by the "
        "inverse. From about 72 500 tokens on the first is infinite in float32 and the second 0, "
        "so their product is NaN.",
        "RotaryEmbedding(64, use_xpos=True)(torch.tensor([0, 100_000]))[1][0, 0, 0]  # inf",
        scheme="xpos",
    ),
    Explanation(
        "transformers: MPT ignores alibi_bias_max", "transformers",
        "`MptModel.forward` builds its bias without the configuration's "
        "`attn_config.alibi_bias_max`, so it is 8. The function itself has the argument, and "
        "agrees at its default.",
        "MptModel(MptConfig(attn_config={'alibi_bias_max': 4}))  # slopes of 8",
        subject="alibi_bias_max=4", shown="12 heads",
    ),
    Explanation(
        "transformers: Falcon's ALiBi is bfloat16", "transformers",
        "`build_alibi_tensor` multiplies slopes in bfloat16 with positions, and the product is "
        "bfloat16, whatever `dtype` is. Slopes that are powers of two are exact for 256 keys; "
        "others are rounded from the first key on. Models that were trained with these numbers "
        "need them.",
        "falcon.build_alibi_tensor(torch.ones(1, 300).long(), 8, torch.float32)[0, 0, 257:260]"
        "\n# 128., 129., 130.: keys 257 to 259 times one half are 128.5, 129. and 129.5",
        subject="falcon",
    ),
    Explanation(
        "transformers: model.to(bfloat16) rounds the frequencies", "transformers",
        "`inv_freq` is a buffer, so a cast of the model casts it, to 8 bits; the float32 product "
        "that follows cannot bring them back. `from_pretrained(dtype=torch.bfloat16)` keeps "
        "float32, and agrees.",
        "LlamaModel(config).to(torch.bfloat16).rotary_emb.inv_freq.dtype  # torch.bfloat16",
        path="model.to(bfloat16)",
    ),
)  # fmt: skip


KNOWN = (
    (
        "bfloat16 positions of rotary-embedding-torch collapse past 256",
        "rotary-embedding-torch: positions in the dtype of the vectors",
    ),
    ("Equinox's cache ignores theta", "Equinox: the first theta is everybody's"),
    (
        "KerasHub's dynamic divides every frequency",
        "KerasHub: rope_type='dynamic' divides every frequency",
    ),
    (
        "slopes of attention-gym for head counts that are no power of two",
        "attention-gym: slopes of ALiBi for head counts that are no power of two",
    ),
    ("MPT of transformers ignores alibi_bias_max", "transformers: MPT ignores alibi_bias_max"),
)
"""What was known before the audit was written, and the explanation whose records must show it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    parser.add_argument("--grid", choices=["full", "ci"], default="full")
    options = parser.parse_args(arguments)
    records = audit_libraries(grid=options.grid)
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / PAGE
    path.write_text(page(records, options.grid), encoding="utf-8")
    print(path)
    return 0


def page(records: Iterable[Record], grid: str) -> str:
    """The page as Markdown."""
    every = list(records)
    groups = grouped(every)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return "\n".join(
        [
            "# What other libraries compute", "",
            *wrapped(
                "Each library's own implementation against the definition, on the grid of "
                "`posenc audit`: near and far positions, rows at other offsets, padding, packing, "
                "6 to 20 heads, a second call, gradients, half precision. *Agrees* is within the "
                "rounding of the dtype. *Cannot express*: the interface has no option for it, such "
                "as positions per row. A library that pairs channels in another way than a "
                "checkpoint is right for other checkpoints."
            ),
            "",
            *wrapped(
                f"Measured on {today} with the {grid} grid on a CPU, Python "
                f"{platform.python_version()}, torch {_version('torch')}, jax {_version('jax')}. "
                f"`python docs/audit_libraries.py` makes this page again."
            ),
            "", "## What was known", "", *known(every), "",
            "## Every call", "", *table(groups), "",
            "## Differences", "", *differences(every), "",
            *_absent(every),
        ]
    )  # fmt: skip


def known(records: Sequence[Record]) -> Iterator[str]:
    """What was known in 2026, and what these records say of it."""
    yield from wrapped("Found in 2026 by hand. Each must come out of the audit by itself:")
    yield ""
    yield "| known | this run |"
    yield "|--|--|"
    for said, title in KNOWN:
        explanation = next(each for each in EXPLANATIONS if each.title == title)
        own = [r for r in records if explanation.explains(r)]
        yield f"| {said} | {_found(own, explanation.library)} |"


def _found(own: Sequence[Record], library: str) -> str:
    """Whether a fault shows in the records of the calls that had it."""
    if not own:
        return f"{library} was not audited"
    asked = [record for record in own if record.status in ("differs", "agrees")]
    if any(record.status == "differs" for record in asked):
        return f"{library} {own[0].version}: {verdict(asked)}"
    if any(record.status == "agrees" for record in own):
        return f"{library} {own[0].version} agrees: it was mended upstream"
    return f"{library} {own[0].version} could not be called"


Key = tuple[str, str, str, str]


def grouped(records: Iterable[Record]) -> dict[Key, list[Record]]:
    """Records by library, scheme, path and call."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        key = (record.library, record.scheme, record.path, record.subject)
        found.setdefault(key, []).append(record)
    return found


def table(groups: dict[Key, list[Record]]) -> Iterator[str]:
    """One row for each call of each library."""
    yield "| library | scheme | path | call | result |"
    yield "|--|--|--|--|--|"
    for (library, scheme, path, subject), records in groups.items():
        if records[0].status == "not installed":
            continue
        name = f"{library} {records[0].version}"
        cells = (name, f"`{scheme}`" if scheme else "", path, f"`{subject}`", verdict(records))
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def verdict(records: Sequence[Record]) -> str:
    """What was found, in a few words."""
    of = {status: [r for r in records if r.status == status] for status in _ORDER}
    parts = []
    if of["differs"]:
        first = min(r.where.get("position", 0) for r in of["differs"])
        errors = [r.error for r in of["differs"] if r.error is not None]
        largest = max((error for error in errors if error < float("inf")), default=None)
        parts.append(
            f"**differs** in {len(of['differs'])} of {len(records)} checks, from position {first}"
            + (f", by up to {largest:.2g}" if largest is not None else "")
        )
    if of["agrees"]:
        parts.append(f"agrees in {len(of['agrees'])}" if parts else "agrees")
    if of["not called"]:
        parts.append(f"**not called** in {len(of['not called'])}: {of['not called'][0].message}")
    if of["cannot express"]:
        why = "; ".join(dict.fromkeys(r.message for r in of["cannot express"]))
        count = len(of["cannot express"])
        parts.append(f"cannot express{f' {count}' if count < len(records) else ''}: {why}")
    return "; ".join(parts)


_ORDER = ("differs", "agrees", "not called", "cannot express", "not installed")


def differences(records: Sequence[Record]) -> Iterator[str]:
    """A section for each explanation: what was measured, or that it is mended; then the rest."""
    left = [record for record in records if record.status == "differs"]
    audited = {record.library: record.version for record in records if record.version}
    for each in EXPLANATIONS:
        about = [record for record in left if each.explains(record)]
        left = [record for record in left if record not in about]
        if each.library not in audited:
            continue
        yield f"### {each.title}"
        yield ""
        if not about:
            yield f"Not in {each.library} {audited[each.library]}: it was mended."
            yield ""
            continue
        yield from wrapped(each.text)
        yield from ("", "```text", *each.code.split("\n"), "```", "")
        shown = next((record for record in about if record.check == each.shown), about[0])
        yield from wrapped(f"The audit says of `{shown.scheme}`, {_check(shown)}: {shown.message}")
        yield from ("", "```text", shown.reproducer, "```", "")
    if left:
        yield "### Not explained yet"
        yield ""
        for record in left:
            about_it = f"{record.library}, `{record.subject}`, `{record.scheme}`, {_check(record)}"
            yield from wrapped(f"- {about_it}: {record.message}")


def _check(record: Record) -> str:
    return f"{record.check}, {record.dtype}" if record.dtype else record.check


def _absent(records: Iterable[Record]) -> Iterator[str]:
    absent = [record.message for record in records if record.status == "not installed"]
    if absent:
        yield "## Not installed"
        yield ""
        yield from wrapped(f"{'; '.join(absent)}.")
        yield ""


def wrapped(text: str) -> list[str]:
    """Lines of at most 100 characters."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
