"""Finds dense layers whose weights are those of GGUF's blocks: Q3_K and Q6_K.

MLX has no groups of 16, so a checkpoint holds such weights in float32. Its config does
not tell them from unquantized ones.
"""

from collections import Counter
from pathlib import Path

from . import k_blocks

# Rows that are looked at; a row of zeros fits every type.
ROWS = 4


def count(folder: Path) -> Counter[str]:
    """Number of layers by ggml's type, from the first rows of every float32 matrix.

    Args:
        folder: of safetensors files in MLX's format.
    """
    from safetensors import safe_open

    found: Counter[str] = Counter()
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dict)
                view = tensors.get_slice(name)
                if view.get_dtype() != "F32" or len(view.get_shape()) != 2:
                    continue
                rows = view[:ROWS]
                blocks = k_blocks.from_weights(rows) if rows.any() else None
                found.update([blocks[0]] if blocks else [])
    return found
