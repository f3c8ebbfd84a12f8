"""The safetensors format, written and read with the standard library and NumPy.

Eight bytes hold the length of the header, little-endian; the header is JSON, name -> ``dtype``,
``shape`` and ``data_offsets`` within the data; the data follow, row-major and little-endian.
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_NAMES = {"<f8": "F64", "<f4": "F32", "<i8": "I64"}
_TYPES = {name: np.dtype(kind) for kind, name in _NAMES.items()}
_SEAL = "sha256"  # in the metadata: of the file without it

Arrays = dict[str, np.ndarray[Any, Any]]


def dump(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file: the same for the same tensors, in any order.

    Wider types come first and the header ends at a multiple of 8 bytes, so all data are aligned.

    Raises
    ------
    TypeError
        A tensor is not float64, float32 or int64.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    data, end = [], 0
    for name, array in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        if (kind := plain.dtype.newbyteorder("<").str) not in _NAMES:
            raise TypeError(f"{name} must be float64, float32 or int64, got {array.dtype}")
        start, end = end, end + plain.nbytes
        shape = list(array.shape)
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [start, end]}
        data.append(plain.tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def load(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """The tensors, which are copies, and the metadata.

    Raises
    ------
    ValueError
        The bytes are no such file, or end early, or hold other dtypes than ``dump`` writes.
    """
    header, start = _header(data)
    metadata = dict(header.pop("__metadata__", {}))
    tensors = {}
    try:
        for name, about in header.items():
            first, end = about["data_offsets"]
            if about["dtype"] not in _TYPES:
                raise ValueError(f"{name} is {about['dtype']}; accepted: {', '.join(_TYPES)}")
            part = data[start + first : start + end]
            flat = np.frombuffer(part, _TYPES[about["dtype"]])
            tensors[name] = flat.reshape(about["shape"]).astype(flat.dtype.newbyteorder("="))
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    return tensors, metadata


def dump_sealed(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> bytes:
    """``dump`` with a digest of the file in the metadata, so that damage is noticed."""
    digest = hashlib.sha256(dump(tensors, metadata)).hexdigest()
    return dump(tensors, {**metadata, _SEAL: digest})


def load_sealed(data: bytes) -> tuple[Arrays, dict[str, str]]:
    """``load`` of what ``dump_sealed`` wrote; ``ValueError`` too if it was damaged or edited."""
    tensors, metadata = load(data)
    digest = metadata.pop(_SEAL, "")
    if hashlib.sha256(dump(tensors, metadata)).hexdigest() != digest:
        raise ValueError("it was damaged or edited since it was written")
    return tensors, metadata


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 + size or size < 2:
        raise ValueError("it is no file of safetensors, or ends early")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + size
