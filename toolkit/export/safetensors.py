"""Safetensors files written tensor by tensor, so that one of them is in memory.

The format: 8 bytes of length, a JSON header with types, shapes and places, the bytes of
the tensors one after the other (github.com/huggingface/safetensors).
"""

import json
from pathlib import Path

import mlx.core as mx

NAMES = {
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


def write(path: Path, tensors: dict[str, mx.array]) -> None:
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
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(_bytes(tensors.pop(name)))


def _bytes(value: mx.array) -> memoryview:
    return memoryview(mx.contiguous(value.reshape(-1)).view(mx.uint8))
