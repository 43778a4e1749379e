"""Integer scales of GGUF's Q3_K and Q6_K, beside a checkpoint.

MLX has no groups of 16, so layers in these blocks are dense in a checkpoint. A file
beside the weights, which mlx-lm does not read, has the two factors of their groups: the
step of a block and the integer scale of a group. The export writes the blocks again.
"""

from pathlib import Path

import mlx.core as mx

from .safetensors_io import read_tensors, write_safetensors

FILE = "gguf_scales.safetensors"
# Names in a layer: float16 [..., N, blocks] and int8 [..., N, groups].
STEPS, SCALES = "block_steps", "block_scales"


def read(folder: Path) -> dict[str, mx.array]:
    """The tensors of a checkpoint's file by name; none if it has no file.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / FILE
    return read_tensors(file) if file.is_file() else {}


def of_dense_layers(folder: Path, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The tensors of a checkpoint's file for the layers that are still dense float32.

    The GGUF export compares those of layers that were trained with the weights.
    """
    return {
        name: value
        for name, value in read(folder).items()
        if (weight := weights.get(f"{name.rpartition('.')[0]}.weight")) is not None
        and weight.dtype == mx.float32
    }


def write(folder: Path, tensors: dict[str, mx.array]) -> None:
    """Write the file of a checkpoint, if there are tensors for it."""
    if tensors:
        write_safetensors(folder / FILE, tensors)


def take(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Remove the factors from the tensors of quantized layers, and return them."""
    names = [name for name in tensors if name.endswith((STEPS, SCALES))]
    return {name: tensors.pop(name) for name in names}
