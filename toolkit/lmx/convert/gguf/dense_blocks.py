"""Finds dense layers whose weights are those of GGUF's blocks: Q3_K and Q6_K.

MLX has no groups of 16, so a checkpoint holds such weights in float32. Its config does
not tell them from unquantized ones.
"""

from collections import Counter
from pathlib import Path

from ...models.safetensors_io import read_header

# Rows of a matrix that decide its type. Rows of zeros fit every type.
ROWS = 4


def count(folder: Path) -> Counter[str]:
    """Number of layers by ggml's type, from the first rows of every float32 matrix.

    Args:
        folder: of safetensors files in MLX's format.

    Raises:
        UserError: a file is damaged.
    """
    from safetensors import safe_open

    # Imported on first use: it needs NumPy, and reading a recipe imports this module.
    from . import k_blocks

    types: Counter[str] = Counter()
    for file in sorted(folder.glob("model*.safetensors")):
        header = read_header(file)
        with safe_open(file, "numpy") as tensors:
            for name, (dtype, shape) in header.items():
                if dtype != "F32" or len(shape) != 2:
                    continue
                rows = tensors.get_slice(name)[: min(ROWS, shape[0])]
                blocks = k_blocks.from_weights(rows) if rows.any() else None
                types.update([blocks[0]] if blocks else [])
    return types
