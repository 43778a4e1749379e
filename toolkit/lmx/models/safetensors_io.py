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
from typing import NamedTuple

import mlx.core as mx

from ..config.text_files import require_regular
from ..errors import FAILED, UserError, library_errors

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
# Bytes of one element of the types that MLX reads.
DTYPE_BYTES = {name: dtype.size for dtype, name in DTYPE_NAMES.items()}
DTYPE_BYTES |= {"F8_E4M3": 1, "F8_E8M0": 1, "C64": 8}
# Readers expect the first tensor at a multiple of this.
ALIGNMENT = 8
# MLX counts the elements of a dimension in 32 bits.
MAX_SIZE = 2**31 - 1


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
        tensors = read_tensors(file)
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


class TensorHeader(NamedTuple):
    """Type, by the format's name, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Type and shape of every tensor in a safetensors file, by name.

    The library of the format checks that the tensors fill the file, without a hole and
    without an overlap, and that shapes and types have the sizes of their bytes.

    Raises:
        UserError: the file is damaged, cut short, missing, or none that MLX reads.
    """
    # Opening a file imports NumPy.
    from safetensors import safe_open

    header = {}
    with _damage_explained(file):
        require_regular(file)
        with safe_open(file, "mlx") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                if dtype not in DTYPE_BYTES or max(shape, default=0) > MAX_SIZE:
                    raise ValueError(f"{name} is of {dtype} and shape {list(shape)}")
                header[name] = TensorHeader(dtype, shape)
    if wide := [name for name, tensor in header.items() if tensor.dtype == "F64"]:
        raise UserError(
            f"{wide[0]} has values of float64, which MLX does not read",
            place=str(file),
            hint="save the weights as float32 with the program that wrote them",
        )
    return header


def read_tensors(file: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file that a user names, unread, by name.

    Raises:
        UserError: see `read_header`.
    """
    read_header(file)
    with _damage_explained(file):
        return mx.load(str(file), format="safetensors")


def _damage_explained(file: Path):
    return library_errors(
        "the file is damaged, cut short or none that MLX reads",
        place=file,
        hint="download or copy the file again",
    )


def require_tensors(
    tensors: dict[str, mx.array],
    required: dict[str, mx.array],
    *,
    place: str,
    hint: str,
) -> None:
    """Refuse tensors that are not exactly those of the parameters.

    Args:
        required: parameters by name, of which only shape and type count.

    Raises:
        UserError: naming a tensor that is missing, not a parameter, of another shape,
            or of integers.
    """
    for name in sorted(required.keys() | tensors.keys()):
        given, needed = tensors.get(name), required.get(name)
        if given is None:
            fault = f"the tensor {name} is missing"
        elif needed is None:
            fault = f"the tensor {name} is not read here"
        elif given.shape != needed.shape:
            shapes = list(given.shape), list(needed.shape)
            fault = f"{name} has the shape {shapes[0]}, here it must be {shapes[1]}"
        elif _is_float(needed) and not _is_float(given):
            fault = f"{name} has values of {given.dtype}, which are no weights"
        else:
            continue
        raise UserError(fault, place=place, hint=hint)


def _is_float(value: mx.array) -> bool:
    return mx.issubdtype(value.dtype, mx.floating)
