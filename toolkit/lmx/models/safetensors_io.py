"""Safetensors files: a writer that holds one tensor at a time, and headers checked.

The format (github.com/huggingface/safetensors): 8 bytes with the length of a JSON
header, little-endian; the header with type, shape and byte range of every tensor; then
the bytes of the tensors, in the header's order.
"""

import json
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import FAILED, UserError
from ..run.fs import require_regular_file

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
# Bytes of one element, with types that MLX lacks. Other types are not checked.
DTYPE_BYTES = {name: dtype.size for dtype, name in DTYPE_NAMES.items()}
DTYPE_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
# Readers expect the first tensor at a multiple of this.
ALIGNMENT = 8
MAX_HEADER_BYTES = 100 << 20
# MLX counts the elements of a dimension in 32 bits.
MAX_SIZE = 2**31 - 1
COPY_HINT = "download or copy the file again"


def write_safetensors(path: Path, tensors: dict[str, mx.array]) -> None:
    """Write a file that MLX, mlx-lm and Hugging Face read.

    Args:
        tensors: by name. The dictionary is emptied, so that each tensor is read or
            computed when it is written, and freed at once.

    Raises:
        UserError: a tensor has a value that is NaN or infinite.
    """
    # The widest types first, so that every tensor begins at a multiple of its type.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.size, name))
    layout = {name: (tensors[name].dtype, tensors[name].shape) for name in order}
    checked = (_finite(name, tensors.pop(name)) for name in order)
    stream_safetensors(path, layout, checked, {"format": "mlx"})


def stream_safetensors(
    path: Path,
    layout: dict[str, tuple[mx.Dtype, tuple[int, ...]]],
    tensors: Iterable[mx.array],
    metadata: dict[str, str],
) -> None:
    """Write tensors that arrive one by one.

    Args:
        layout: type and shape of every tensor, by name.
        tensors: in the order of `layout`.

    Raises:
        OSError: the disk refuses.
        ValueError: a tensor differs from `layout`, or there are too many or too few.
    """
    header: dict[str, dict] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + prod(shape) * dtype.size
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in zip(layout, tensors, strict=True):
            if (tensor.dtype, tensor.shape) != layout[name]:
                raise ValueError(f"{name} differs from the announced type or shape")
            stream.write(memoryview(mx.contiguous(tensor).reshape(-1).view(mx.uint8)))


def require_finite(folder: Path) -> None:
    """Check the weights of a checkpoint, one tensor at a time.

    Raises:
        UserError: a tensor has a value that is NaN or infinite.
    """
    for file in sorted(folder.glob("*.safetensors")):
        tensors = mx.load(str(file))
        for name in list(tensors):
            _finite(name, tensors.pop(name), place=str(file))


def _finite(name: str, tensor: mx.array, place: str | None = None) -> mx.array:
    """The tensor, if all its values are finite."""
    if not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor
    if not mx.isfinite(tensor).all().item():
        raise UserError(
            f"the tensor {name} has values that are NaN or infinite",
            hint="the model is damaged, or was trained at too high a learning rate",
            place=place,
            code=FAILED,
        )
    return tensor


def read_header(file: Path) -> dict[str, dict]:
    """Type, shape and byte range of every tensor in a safetensors file, by name.

    Raises:
        UserError: the file is cut short or is something else.
    """
    require_regular_file(file)
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, MAX_HEADER_BYTES)))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is no object of tensors")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not _all_are(metadata.values(), str):
        raise _damaged(file, "its __metadata__ is no object of texts")
    faults = ((name, _tensor_fault(tensor)) for name, tensor in header.items())
    for name, fault in faults:
        if fault:
            raise UserError(
                f"the file is damaged: {name} {fault}", place=str(file), hint=COPY_HINT
            )
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if (size := file.stat().st_size) < (end := 8 + length + end):
        raise UserError(
            f"the file is cut short: {size:,} of {end:,} bytes", place=str(file)
        )
    return header


def _damaged(file: Path, reason: str) -> UserError:
    return UserError(
        f"this is no safetensors file, or it is damaged: {reason}",
        place=str(file),
        hint=COPY_HINT,
    )


def _tensor_fault(tensor: Any) -> str | None:
    """Why MLX cannot read a tensor of a header; None if it can."""
    tensor = tensor if isinstance(tensor, dict) else {}
    dtype, shape, ends = map(tensor.get, ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str):
        return "has no type"
    if not isinstance(shape, list) or not _all_are(shape, int):
        return "has no shape"
    if not all(0 <= size <= MAX_SIZE for size in shape):
        return f"has the shape {shape}"
    if not isinstance(ends, list) or len(ends) != 2 or not _all_are(ends, int):
        return "has no byte range"
    element = DTYPE_BYTES.get(dtype)
    if not 0 <= ends[0] <= ends[1] or (
        element is not None and ends[1] - ends[0] != prod(shape) * element
    ):
        return "has a shape that does not match its byte range"
    return None


def _all_are(values: Iterable, kind: type) -> bool:
    """Whether the type of all values is this one: a bool is no int."""
    return all(type(value) is kind for value in values)
