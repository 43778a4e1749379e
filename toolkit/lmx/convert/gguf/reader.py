"""Reads GGUF files, versions 2 and 3: metadata and memory-mapped tensors.

The layout (ggml's gguf.md): magic, version, counts of tensors and of metadata; metadata
as key, type, value; for every tensor its name, shape (innermost size first), type and
offset; then the aligned tensors. All values are little-endian. `gguf.GGUFReader` makes
one NumPy view of every array element, so a large vocabulary takes it seconds and much
memory.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Metadata types by number, as struct codes; 8 is a string, 9 an array.
SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Name, values per block and bytes per block, by ggml's type number.
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file.

    Attributes:
        ggml_type: the name of its type.
        shape: the outermost size first.
        blocks: uint8 [..., bytes per block], a view of the file.
    """

    ggml_type: str
    shape: tuple[int, ...]
    blocks: np.ndarray


def read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata and tensors of a file, by name.

    Raises:
        UserError: not a GGUF file, a truncated one, or a tensor of an unknown type.
    """
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else b""
    try:
        return _read(_Cursor(data), data)
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise UserError(
            "this is not a GGUF file, or it is truncated", place=str(path)
        ) from error
    except UserError as error:
        raise UserError(error.message, place=str(path), hint=error.hint) from error


class _Cursor:
    """Reads values in sequence."""

    def __init__(self, data: np.ndarray):
        self._data = memoryview(data)
        self.position = 0

    def scalar(self, code: str) -> int | float | bool:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self._data, self.position)
        self.position += layout.size
        return values

    def string(self) -> str:
        length = self.scalar("Q")
        text = bytes(self._data[self.position : self.position + length])
        self.position += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            return list(self.scalars(SCALARS[kind], count))
        return [self.value(kind) for _ in range(count)]


def _read(cursor: _Cursor, data: np.ndarray) -> tuple[dict, dict[str, GGUFTensor]]:
    magic, version = bytes(cursor.scalars("B", 4)), cursor.scalar("I")
    if magic != MAGIC or version not in VERSIONS:
        raise UserError(
            f"this is not a GGUF file of version {' or '.join(map(str, VERSIONS))}"
        )
    tensors, count = cursor.scalars("Q", 2)
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(count)}
    entries = [_tensor_info(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(cursor.position / alignment) * alignment
    return metadata, {n: _tensor(n, *entry, data[start:]) for n, *entry in entries}


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type number and offset."""
    name, dimensions = cursor.string(), cursor.scalar("I")
    shape = cursor.scalars("Q", dimensions)[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    name: str, shape: tuple[int, ...], number: int, offset: int, data: np.ndarray
) -> GGUFTensor:
    if number not in GGML_TYPES:
        raise UserError(
            f"{name} has ggml's type {number}, which is not supported",
            hint=f"supported types: {', '.join(n for n, *_ in GGML_TYPES.values())}",
        )
    ggml_type, block_values, block_bytes = GGML_TYPES[number]
    size = math.prod(shape) // block_values * block_bytes
    raw = data[offset : offset + size]
    if len(raw) < size:
        raise UserError(f"the file is truncated: {name} is incomplete")
    blocks = raw.reshape(*shape[:-1], shape[-1] // block_values, block_bytes)
    return GGUFTensor(ggml_type, shape, blocks)
