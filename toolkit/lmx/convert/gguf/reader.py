"""Reads GGUF files, versions 2 and 3: metadata and memory-mapped tensors.

The layout (ggml's gguf.md): magic, version, counts of tensors and of metadata; metadata
as key, type, value; for every tensor its name, shape (innermost size first), type and
offset; then the aligned tensors. All values are little-endian. `gguf.GGUFReader`
believes the lengths of a damaged file, and makes one NumPy view of every array element,
so a large vocabulary takes it seconds and much memory.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...config.text_files import require_regular
from ...errors import UserError, library_errors

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Metadata types by number, as struct codes; 8 is a string, 9 an array.
SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# The fewest bytes of a list and of a string, of a key with a value, and of the
# description of a tensor.
MIN_BYTES, MIN_VALUE_BYTES, MIN_TENSOR_BYTES = (12, 8), 13, 24
# ggml's own limits are 4 dimensions and no lists of lists.
MAX_DIMENSIONS, MAX_DEPTH, MAX_ALIGNMENT = 4, 4, 1 << 20
NO_GGUF = "this is not a GGUF file"
HINT = "download or copy the file again"
PLAIN = ("F32", "F16", "I64")


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

    Every length is compared with the bytes that the file has before it is believed.

    Raises:
        UserError: not a GGUF file, a damaged one, or a tensor of an unknown type.
    """
    require_regular(path)
    with path.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise UserError(NO_GGUF, place=str(path), hint=HINT)
    with library_errors("the file cannot be mapped to memory", place=path, hint=HINT):
        data = np.memmap(path, np.uint8, "r")
    try:
        cursor = _Cursor(data)
        _, version = cursor.scalars("B", len(MAGIC)), cursor.scalar("I")
        if version not in VERSIONS:
            raise UserError(f"{NO_GGUF} of version {' or '.join(map(str, VERSIONS))}")
        count, entries = cursor.scalars("Q", 2)
        cursor.require(count * MIN_TENSOR_BYTES + entries * MIN_VALUE_BYTES)
        metadata = {
            cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(entries)
        }
        places = []
        for _ in range(count):
            name, dimensions = cursor.string(), cursor.scalar("I")
            if not 1 <= dimensions <= MAX_DIMENSIONS:
                raise UserError(f"{name[:80]!r} has {dimensions:,} dimensions")
            shape = cursor.scalars("Q", dimensions)[::-1]
            places.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT:
            raise UserError(
                f"general.alignment is {alignment!r}; it must be such as 32"
            )
        start = math.ceil(cursor.position / alignment) * alignment
        tensors = {n: _tensor(n, *place, data[start:]) for n, *place in places}
        return metadata, tensors
    except UnicodeDecodeError as error:
        message = f"{NO_GGUF}: a text is not UTF-8"
        raise UserError(message, place=str(path), hint=HINT) from error
    except UserError as error:
        hint = error.hint or HINT
        raise UserError(error.message, place=str(path), hint=hint) from error


class _Cursor:
    """Reads values in sequence."""

    def __init__(self, data: np.ndarray):
        self._data = memoryview(data)
        self.position = 0

    def scalar(self, code: str) -> int | float | bool:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple:
        size = count * struct.calcsize(f"<{code}")
        return struct.unpack(f"<{count}{code}", self._take(size))

    def string(self) -> str:
        return bytes(self._take(self.scalar("Q"))).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise UserError(f"{NO_GGUF}: a value has the unknown type {kind}")
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            return list(self.scalars(SCALARS[kind], count))
        if depth == MAX_DEPTH:
            raise UserError(f"{NO_GGUF}: lists are nested too deeply")
        self.require(count * MIN_BYTES[kind == STRING])
        return [self.value(kind, depth + 1) for _ in range(count)]

    def require(self, size: int) -> None:
        """Raise UserError if fewer bytes are left."""
        left = len(self._data) - self.position
        if size > left:
            raise UserError(
                f"{NO_GGUF}, or it is truncated: at byte {self.position:,} it "
                f"announces {size:,} bytes and has {left:,}"
            )

    def _take(self, size: int) -> memoryview:
        self.require(size)
        start, self.position = self.position, self.position + size
        return self._data[start : self.position]


def _tensor(
    name: str, shape: tuple[int, ...], number: int, offset: int, data: np.ndarray
) -> GGUFTensor:
    import gguf

    kinds = {kind: kind.name for kind in gguf.GGMLQuantizationType}
    # The package has a class for every type that it dequantizes.
    known = {k: v for k, v in kinds.items() if v in PLAIN or hasattr(gguf.quants, v)}
    if number not in known:
        raise UserError(
            f"{name} has ggml's type {kinds.get(number, number)}, which is not "
            "supported",
            hint=f"supported types: {', '.join(known.values())}",
        )
    ggml_type = known[number]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[number]
    if not all(0 < size < 2**31 for size in shape) or shape[-1] % block_values:
        raise UserError(
            f"{name} has the shape {list(shape)}, which {ggml_type} cannot have"
        )
    size = math.prod(shape) // block_values * block_bytes
    raw = data[offset : offset + size]
    if len(raw) < size:
        raise UserError(f"the file is truncated: {name} is incomplete")
    blocks = raw.reshape(*shape[:-1], shape[-1] // block_values, block_bytes)
    return GGUFTensor(ggml_type, shape, blocks)
