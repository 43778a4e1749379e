"""A safetensors file written tensor by tensor, so that no more than one is in memory.

The format: 8 bytes with the length of a JSON header, little-endian; the header with
every tensor's type, shape and place; then the tensors' bytes, in the header's order.
"""

import json
import math
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path

import mlx.core as mx

from ..errors import UserError

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


# --- from export.safetensors: Safetensors files written tensor by tensor, so that one of them is in memory.
#
# The format: 8 bytes of length, a JSON header with types, shapes and places, the bytes of
# the tensors one after the other (github.com/huggingface/safetensors).


DTYPE_NAMES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float64: "F64",
}


def write_safetensors(path: Path, tensors: dict[str, mx.array]) -> None:
    """Write a file that MLX, mlx-lm and Hugging Face read.

    Args:
        tensors: by name; emptied on the way, so that what is read or computed only now
            is let go at once unless others hold it.
    """
    # The widest types first, so that every tensor begins at a multiple of its type.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.size, name))
    header: dict[str, dict] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in order:
        value, start = tensors[name], end
        end += value.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(_to_bytes(tensors.pop(name)))


def _to_bytes(value: mx.array) -> memoryview:
    return memoryview(mx.contiguous(value.reshape(-1)).view(mx.uint8))


# Bytes of a number of each type a safetensors file may name; of others, MLX's to say.
WIDTHS = dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1)
WIDTHS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 2)
WIDTHS |= dict.fromkeys(("U32", "I32", "F32"), 4)
WIDTHS |= dict.fromkeys(("U64", "I64", "F64", "C64"), 8)


def read_header(file: Path) -> dict[str, dict]:
    """Type, shape and place of every tensor in a safetensors file, by name.

    Raises:
        UserError: the file is cut short or is something else.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, 100 << 20)))
        header.pop("__metadata__", None)
        broken = [name for name, tensor in header.items() if not _is_sound(tensor)]
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            "this is no safetensors file, or it is damaged", place=str(file)
        ) from error
    end = 8 + length + max(ends, default=0)
    if file.stat().st_size < end:
        raise UserError(
            f"the file is cut short: {file.stat().st_size:,} of {end:,} bytes",
            place=str(file),
        )
    if broken:
        raise UserError(
            f"the file is damaged: {broken[0]} has a shape of other bytes than its own",
            place=str(file),
        )
    return header


def _is_sound(tensor: dict) -> bool:
    """Whether a tensor's place in the file is as long as its type and shape say."""
    start, end = tensor["data_offsets"]
    width = WIDTHS.get(tensor["dtype"])
    size = math.prod(tensor["shape"])
    is_known = 0 <= start <= end and min(tensor["shape"], default=0) >= 0
    return is_known and (width is None or end - start == size * width)
