"""MLX's affine groups as the blocks of ggml's types, code by code, not rounded again.

A block has 32 codes with one scale d and, where it has one, one minimum m, both
float16; a larger group of MLX's is several blocks with the same ones. ggml's layouts
are those told in toolkit/model/foreign/gguf_blocks.py.
"""

import mlx.core as mx
import numpy as np

from ..importers.affine_repack import unpack

BLOCK = 32
# ggml's types for codes of so many bits, without a minimum and with one. Codes of 2 and
# 3 bits are codes of 4 as they are.
TYPES = {
    2: (None, "Q4_1"),
    3: (None, "Q4_1"),
    4: ("Q4_0", "Q4_1"),
    5: ("Q5_0", "Q5_1"),
    8: ("Q8_0", None),
}


def grouped(
    parts: dict[str, mx.array], bits: int, group_size: int
) -> tuple[str, np.ndarray] | None:
    """The type and the bytes [rows, bytes of a row] of a quantized matrix.

    Args:
        parts: weight (codes), scales and biases, as MLX stores them.

    Returns:
        None where ggml has no such codes, or float16 does not hold the numbers.
    """
    plain, shifted = TYPES.get(bits, (None, None))
    times = group_size // BLOCK
    scales, biases = (
        np.repeat(np.array(parts[name].astype(mx.float32)), times, axis=-1)
        for name in ("scales", "biases")
    )
    codes = np.array(unpack(parts["weight"], bits).astype(mx.uint8))
    codes = codes.reshape(*scales.shape, BLOCK)
    if plain and (biases == -(2 ** (bits - 1)) * scales).all():
        kind, numbers = plain, [scales]
    else:
        kind, numbers = shifted, [scales, biases]
    halves = [number.astype(np.float16) for number in numbers]
    pairs = zip(halves, numbers, strict=True)
    if kind is None or not all((half == number).all() for half, number in pairs):
        return None
    heads = [half[..., None].view(np.uint8) for half in halves]
    blocks = np.concatenate([*heads, _codes(codes, kind)], axis=-1)
    return kind, blocks.reshape(len(blocks), -1)


def dense(value: mx.array) -> tuple[str, np.ndarray]:
    """The type of an unquantized tensor, and its numbers in it.

    float32 for vectors, as llama.cpp wants them, and for what float16 cannot reach;
    else float16, or bfloat16 where only that one holds them exactly.
    """
    wide = np.array(value.astype(mx.float32))
    if wide.ndim < 2:
        return "F32", wide
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    if not np.isfinite(half).all():
        return "F32", wide
    if value.dtype == mx.bfloat16 and (half != wide).any():
        return "BF16", np.array(mx.contiguous(value).view(mx.uint16))
    return "F16", half


def _codes(codes: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of codes [..., 32]."""
    if kind == "Q8_0":
        # Codes less 128, as int8.
        return codes ^ 128
    low = (codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4)
    if kind.startswith("Q4"):
        return low
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate([fifth, low], axis=-1)
