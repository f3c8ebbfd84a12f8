"""Reads golden vectors with nothing of posenc, and computes RoPE and ALiBi by their formulas.

Run as a program: ``python read_vectors.py FOLDER``.
"""

import hashlib
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "I64": "<i8"}


def read(path):
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__")["format"] == "posenc.vectors/1"
    ends = sorted(tensor["data_offsets"] for tensor in header.values())
    assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), ends[-1][1]]
    assert 8 + length + ends[-1][1] == len(data)
    tensors = {}
    for name, about in header.items():
        start, end = about["data_offsets"]
        array = np.frombuffer(data[8 + length + start : 8 + length + end], TYPES[about["dtype"]])
        tensors[name] = array.reshape(about["shape"])
    return tensors


def load(folder, scheme):
    """The cases of a scheme, whose arrays are in the place of their names."""
    about = json.loads((folder / f"{scheme}.json").read_text())
    tensors = read(folder / about["tensors"])
    for case in about["cases"]:
        for group in ("inputs", "params", "expected", "expected_float32"):
            case[group] = {name: tensors[key] for name, key in case[group].items()}
    return about["cases"]


def check_sums(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    for digest, name in (line.split("  ") for line in lines):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    return len(lines)


def hashed(shape, stream, denominator):
    """The hash of docs/vectors.md, in plain integers."""
    numbers = []
    for i in range(math.prod(shape)):
        h = (i * 2654435761 + stream * 2246822519 + 374761393) % 2**32
        h = (h ^ h >> 15) * 2246822519 % 2**32
        h = (h ^ h >> 13) * 3266489917 % 2**32
        h ^= h >> 16
        numbers.append((h % 129 - 64) / denominator)
    return np.array(numbers).reshape(shape)


def rope(x, pos, frequencies, layout):
    """``x (B, H, L, D)`` at ``pos (B, L)``, in the dtype of ``x``."""
    angle = pos[:, None, :, None].astype(x.dtype) * np.asarray(frequencies, x.dtype)
    cos, sin, out, n = np.cos(angle), np.sin(angle), x.copy(), len(frequencies)
    halves = slice(0, n), slice(n, 2 * n)
    first, second = halves if layout == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def alibi(heads, q_pos, k_pos):
    """Slopes of the paper: of 8 heads for the first 8, of 16, every other one, for more."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return -np.array(slopes)[:, None, None] * abs(q_pos[:, None] - k_pos)


def compare(case, found, name, dtype, position):
    expected, tolerance = case["expected"][name], case["tolerances"][dtype]
    allowed = tolerance["absolute"] + tolerance["relative"] * abs(expected)
    allowed = allowed + tolerance["per_position"] * position
    error = abs(found - expected)
    assert np.all(error <= allowed), (case["name"], dtype, error.max())
    assert np.any(error[error > 0] < 1e6 * np.finfo(dtype).eps), "tolerances hide nothing"


def main(folder):
    sums, done = check_sums(folder), 0
    for case in load(folder, "rope"):
        if case["kind"] != "rotation":
            continue
        x, pos, options = case["inputs"]["x"], case["inputs"]["pos"], case["options"]
        np.testing.assert_array_equal(x, hashed(x.shape, 1, 32))
        dim = options.get("rotary_dim", x.shape[-1])
        base = options.get("base", 10000.0)
        frequencies = base ** (-np.arange(0, dim, 2) / dim)
        np.testing.assert_allclose(case["frequencies"], frequencies, rtol=1e-14)
        for dtype in ("float64", "float32"):
            found = rope(x.astype(dtype), pos, frequencies, options["layout"])
            for name in ("query", "key"):
                compare(case, found, name, dtype, pos[:, None, :, None])
        wrong = {"half": "interleaved", "interleaved": "half"}[options["layout"]]
        wrong = rope(x.astype(np.float64), pos, frequencies, wrong)
        assert abs(wrong - case["expected"]["query"]).max() > 0.5
        done += 1
    for case in load(folder, "alibi"):
        if case["kind"] != "bias" or case["options"]:
            continue
        q_pos, k_pos = case["inputs"]["q_pos"], case["inputs"]["k_pos"]
        found = alibi(case["sizes"]["num_heads"], q_pos, k_pos)
        for dtype in ("float64", "float32"):
            tolerance = case["tolerances"][dtype]
            error = abs(found.astype(dtype) - case["expected"]["out"])
            limit = tolerance["absolute"] + tolerance["relative"] * abs(found)
            assert np.all(error <= limit), case["name"]
        done += 1
    assert not [name for name in sys.modules if name.startswith("posenc")]
    print(f"{sums} files, {done} cases agree")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
