"""GGUF files: metadata and where every tensor is, without the tensors' numbers.

The layout of versions 2 and 3 (ggml's gguf.md): magic, version, counts of tensors and
of metadata; metadata as key, type, value; of every tensor name, sizes (the innermost
first), type and offset; then, aligned, the tensors. All little-endian.
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
# Metadata types, by number; 8 is a string, 9 an array.
NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# Name, numbers in a block and bytes of a block, by ggml's number of a type.
KINDS = {
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
class Tensor:
    """A tensor of a file.

    Attributes:
        kind: ggml's name of its type.
        shape: the outermost size first.
        blocks: uint8 [..., bytes of a block], a view of the file.
    """

    kind: str
    shape: tuple[int, ...]
    blocks: np.ndarray


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of a file, by name.

    Raises:
        UserError: no GGUF file, one cut short, or a tensor of a type not known here.
    """
    data = np.memmap(path, np.uint8, "r") if path.stat().st_size else b""
    try:
        return _read(_Cursor(data), data)
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise UserError(
            "this is no GGUF file, or it is cut short", place=str(path)
        ) from error
    except UserError as error:
        raise UserError(error.message, place=str(path), hint=error.hint) from error


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: np.ndarray):
        self._data = memoryview(data)
        self.place = 0

    def number(self, code: str) -> int | float | bool:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        found = layout.unpack_from(self._data, self.place)
        self.place += layout.size
        return found

    def string(self) -> str:
        length = self.number("Q")
        text = bytes(self._data[self.place : self.place + length])
        self.place += length
        return text.decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            return list(self.numbers(NUMBERS[kind], count))
        return [self.value(kind) for _ in range(count)]


def _read(cursor: _Cursor, data: np.ndarray) -> tuple[dict, dict[str, Tensor]]:
    magic, version = bytes(cursor.numbers("B", 4)), cursor.number("I")
    if magic != MAGIC or version not in VERSIONS:
        raise UserError(
            f"this is no GGUF file of version {' or '.join(map(str, VERSIONS))}"
        )
    tensors, count = cursor.numbers("Q", 2)
    metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(count)}
    entries = [_entry(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = math.ceil(cursor.place / alignment) * alignment
    return metadata, {n: _tensor(n, *entry, data[start:]) for n, *entry in entries}


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset."""
    name, count = cursor.string(), cursor.number("I")
    shape = cursor.numbers("Q", count)[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(
    name: str, shape: tuple[int, ...], kind: int, offset: int, data: np.ndarray
) -> Tensor:
    if kind not in KINDS:
        raise UserError(
            f"{name} is of ggml's type {kind}, which is not read here",
            hint=f"types that are: {', '.join(name for name, *_ in KINDS.values())}",
        )
    title, numbers, size = KINDS[kind]
    count = math.prod(shape) // numbers
    found = data[offset : offset + count * size]
    if len(found) < count * size:
        raise UserError(f"the file is cut short: {name} is not whole")
    blocks = found.reshape(*shape[:-1], shape[-1] // numbers, size)
    return Tensor(title, shape, blocks)
