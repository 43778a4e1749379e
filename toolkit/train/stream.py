"""A safetensors file written tensor by tensor, so that no more than one is in memory.

The format: 8 bytes with the length of a JSON header, little-endian; the header with
every tensor's type, shape and place; then the tensors' bytes, in the header's order.
"""

import json
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path

import mlx.core as mx

TYPES = {
    mx.float32: "F32",
    mx.bfloat16: "BF16",
    mx.float16: "F16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint32: "U32",
    mx.uint64: "U64",
}
# Readers want the first tensor's bytes at a multiple of this.
ALIGNMENT = 8


def write_tensors(
    path: Path,
    layout: dict[str, tuple[mx.Dtype, tuple[int, ...]]],
    values: Iterable[mx.array],
    metadata: dict[str, str],
) -> None:
    """Write tensors that come one by one.

    Args:
        layout: type and shape of every tensor, by name.
        values: the tensors, in the order of `layout`.

    Raises:
        OSError: the disk refuses.
        ValueError: a tensor is not as it was announced, or there are too many or few.
    """
    header = json.dumps(_header(layout, metadata), separators=(",", ":")).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        for name, value in zip(layout, values, strict=True):
            if (value.dtype, value.shape) != layout[name]:
                raise ValueError(f"{name} is not as it was announced")
            stream.write(memoryview(mx.contiguous(value).reshape(-1).view(mx.uint8)))


def _header(layout: dict, metadata: dict[str, str]) -> dict:
    header: dict = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + prod(shape) * dtype.size
        header[name] = {
            "dtype": TYPES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    return header
