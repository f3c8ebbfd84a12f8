"""The safetensors format, written with the standard library and NumPy.

Eight bytes hold the length of the header, little-endian; the header is JSON, name -> ``dtype``,
``shape`` and ``data_offsets`` within the data; the data follow, row-major and little-endian.
https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_NAMES = {"<f8": "F64", "<f4": "F32", "<i8": "I64"}


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
