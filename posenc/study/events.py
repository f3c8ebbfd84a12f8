"""Event files of TensorBoard, written by their definition: scalars only, and no package needed.

A file is a sequence of TFRecords: the length of the data (64 bits), its checksum, the data, their
checksum, all little-endian. The checksum is CRC-32C, rotated and shifted ("masked"), as
``core/lib/io/record_writer.h`` of TensorFlow says. The data are messages ``Event``, of
``core/util/event.proto``: ``wall_time = 1`` (double), ``step = 2`` (varint), ``file_version = 3``,
``summary = 5``. A summary is a list ``value = 1`` of ``tag = 1`` and ``simple_value = 2`` (float).
"""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed
_MASK = 0xA282EAD8
_BITS = 0xFFFFFFFF
_VERSION = b"brain.Event:2"
_DOUBLE, _FLOAT, _VARINT, _BYTES = 1, 5, 0, 2  # wire types of protocol buffers


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_row, range(256)))


class Events:
    """One new event file in ``folder``, which appears with the first scalars."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append scalars of a step; each call writes to the disk, so a kill loses none."""
        if not values:
            return
        records = record(event(time.time(), step, values))
        if self._path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            unique = f"{os.getpid()}-{secrets.token_hex(4)}"
            self._path = self._folder / f"events.out.tfevents.{time.time():.0f}.posenc.{unique}"
            begin = _key(1, _DOUBLE) + struct.pack("<d", time.time()) + _field(3, _VERSION)
            records = record(begin) + records
        with self._path.open("ab") as file:
            file.write(records)

    def close(self) -> None:
        """Nothing is left open."""


def event(seconds: float, step: int, values: Mapping[str, float]) -> bytes:
    """An ``Event`` with the scalars of a step."""
    scalars = (
        _field(1, _field(1, tag.encode()) + _key(2, _FLOAT) + struct.pack("<f", value))
        for tag, value in values.items()
    )
    begin = _key(1, _DOUBLE) + struct.pack("<d", seconds) + _key(2, _VARINT) + _varint(step)
    return begin + _field(5, b"".join(scalars))


def record(data: bytes) -> bytes:
    """A TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    found = _BITS
    for byte in data:
        found = _TABLE[(found ^ byte) & 0xFF] ^ found >> 8
    return found ^ _BITS


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & _BITS


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _field(number: int, content: bytes) -> bytes:
    return _key(number, _BYTES) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
