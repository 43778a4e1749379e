"""ggml's blocks as MLX's affine groups and back, code by code, without requantization.

A block starts with d (float16). 32 weights share a scale: Q4_0, Q5_0 and Q8_0 are d *
(code - middle); Q4_1 and Q5_1 are d * code + m. Blocks of Q4_K and Q5_K have eight such
groups, d * scale * code - m * minimum, with 6-bit scales and minima, and float32 holds
the products exactly. The groups of 16 of Q6_K are too small for MLX: such tensors
become dense float32, which holds d * scale * (code - 32) exactly.
"""

import mlx.core as mx
import numpy as np

from ...quantization.packing import pack_codes, unpack_codes
from ..importers.affine_repack import AffineGroups, narrow_biases
from .reader import GGUFTensor

BLOCK = 32
# ggml's types for codes of so many bits: symmetric, and with a minimum. Codes of 2 and
# 3 bits are stored as codes of 4 bits.
TYPES_BY_BITS = {
    2: (None, "Q4_1"),
    3: (None, "Q4_1"),
    4: ("Q4_0", "Q4_1"),
    5: ("Q5_0", "Q5_1"),
    8: ("Q8_0", None),
}

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def to_affine_groups(tensor: GGUFTensor) -> AffineGroups | None:
    """A quantized matrix in groups of 32; None for a type without such groups."""
    if tensor.ggml_type not in GROUPED_TYPES:
        return None
    split, bits = GROUPED_TYPES[tensor.ggml_type]
    codes, scales, biases = split(tensor.blocks)
    rows, width = tensor.shape[0], tensor.shape[-1]
    packed = pack_codes(mx.array(codes.reshape(rows, width)), bits)
    mx.eval(packed)
    scales, biases = narrow_biases(
        mx.array(scales.reshape(rows, -1)),
        mx.array(biases.reshape(rows, -1).astype(np.float32)),
    )
    return AffineGroups(packed, scales, biases, np.arange(width) // BLOCK, bits)


def to_dense(tensor: GGUFTensor) -> mx.array:
    """A tensor's values; float32 values in 16 bits if that changes none."""
    if tensor.ggml_type == "BF16":
        bits = mx.array(np.ascontiguousarray(tensor.blocks).view(np.uint16))
        return bits.view(mx.bfloat16).reshape(tensor.shape)
    if tensor.ggml_type == "Q6_K":
        return mx.array(_dequantize_q6_k(tensor.blocks).reshape(tensor.shape))
    dtype = {"F32": np.float32, "F16": np.float16}[tensor.ggml_type]
    values = mx.array(np.ascontiguousarray(tensor.blocks).view(dtype))
    values = values.reshape(tensor.shape)
    # llama.cpp stores all norms as float32, which would make a model compute in it.
    for narrow in (mx.float16, mx.bfloat16):
        rounded = values.astype(narrow)
        if mx.array_equal(rounded.astype(values.dtype), values):
            return rounded
    return values


def from_affine_groups(
    parts: dict[str, mx.array], bits: int, group_size: int
) -> tuple[str, np.ndarray] | None:
    """ggml's type and the bytes [rows, bytes of a row] of a quantized matrix.

    A group of more than 32 weights becomes several blocks with the same scale.

    Args:
        parts: weight (codes), scales and biases, as MLX stores them.

    Returns:
        None if ggml has no such codes, or float16 does not hold the scales or biases.
    """
    symmetric_type, minimum_type = TYPES_BY_BITS.get(bits, (None, None))
    scales, biases = (
        np.repeat(np.array(parts[name].astype(mx.float32)), group_size // BLOCK, -1)
        for name in ("scales", "biases")
    )
    codes = np.array(unpack_codes(parts["weight"], bits).astype(mx.uint8))
    codes = codes.reshape(*scales.shape, BLOCK)
    if symmetric_type and (biases == -(2 ** (bits - 1)) * scales).all():
        ggml_type, values = symmetric_type, [scales]
    else:
        ggml_type, values = minimum_type, [scales, biases]
    halves = [value.astype(np.float16) for value in values]
    exact = all((h == v).all() for h, v in zip(halves, values, strict=True))
    if ggml_type is None or not exact:
        return None
    heads = [half[..., None].view(np.uint8) for half in halves]
    blocks = np.concatenate([*heads, _code_bytes(codes, ggml_type)], axis=-1)
    return ggml_type, blocks.reshape(len(blocks), -1)


def from_dense(value: mx.array) -> tuple[str, np.ndarray]:
    """ggml's type of an unquantized tensor, and its values in that type.

    float32 for vectors, as llama.cpp requires, and for values beyond float16; else
    float16, or bfloat16 if only that holds the values exactly.
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


def _code_bytes(codes: np.ndarray, ggml_type: str) -> np.ndarray:
    """The bytes of codes [..., 32]."""
    if ggml_type == "Q8_0":
        # Codes minus 128, as int8.
        return codes ^ 128
    low = (codes[..., :16] & 15) | ((codes[..., 16:] & 15) << 4)
    if ggml_type.startswith("Q4"):
        return low
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate([fifth, low], axis=-1)


def _float16(blocks: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes [..., 2 n] of bytes [..., n]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(words: np.ndarray) -> np.ndarray:
    """The highest bits [..., 32] of 5-bit codes, from four bytes."""
    return np.unpackbits(words, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Parts:
    scale = _float16(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, -8 * scale.astype(np.float32)


def _q4_1(blocks: np.ndarray) -> Parts:
    return _nibbles(blocks[..., 4:]), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: np.ndarray) -> Parts:
    scale = _float16(blocks, 0)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return codes, scale, -16 * scale.astype(np.float32)


def _q5_1(blocks: np.ndarray) -> Parts:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return codes, _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: np.ndarray) -> Parts:
    scale = _float16(blocks, 0)
    # int8 plus 128 is the same byte with its highest bit flipped.
    return blocks[..., 2:] ^ 128, scale, -128 * scale.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Parts:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _nibbles(pairs), *_small_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Parts:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    # A byte holds the fifth bits of the codes at its position in all eight groups.
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts) & 1
    fifth = fifth.reshape(*blocks.shape[:-1], 4, 64) << 4
    return _nibbles(pairs) | fifth, *_small_scales(blocks)


def _small_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases float32 [..., 8] of a K block.

    The block starts with d, m and twelve bytes of 6-bit values: four bytes with the
    scales of groups 0 to 3, four with their minima, and four with the low nibbles of
    groups 4 to 7, whose two highest bits are above those of groups 0 to 3.
    """
    low = blocks[..., 4:8], blocks[..., 8:12]
    nibbles = blocks[..., 12:16]
    scales = np.concatenate([low[0] & 63, (nibbles & 15) | (low[0] >> 6 << 4)], axis=-1)
    minima = np.concatenate([low[1] & 63, (nibbles >> 4) | (low[1] >> 6 << 4)], axis=-1)
    d, m = (_float16(blocks, start).astype(np.float32) for start in (0, 2))
    return d * scales, -m * minima


def _dequantize_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Float32 [..., 256] of Q6_K: low nibbles, high bit pairs, int8 scales, d."""
    halves = (*blocks.shape[:-1], 2)
    low = blocks[..., :128].reshape(*halves, 64)
    high = blocks[..., 128:192].reshape(*halves, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = ((high[..., None, :] >> shifts) & 3).reshape(*halves, 128)
    codes = (_nibbles(low) | (pairs << 4)).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    steps = _float16(blocks, 208).astype(np.float32) * scales
    return codes.reshape(*blocks.shape[:-1], 16, 16) * steps[..., None]


# Splits the blocks of a type into codes, scales and biases; bits of its codes.
GROUPED_TYPES = {
    "Q4_0": (_q4_0, 4),
    "Q4_1": (_q4_1, 4),
    "Q5_0": (_q5_0, 5),
    "Q5_1": (_q5_1, 5),
    "Q8_0": (_q8_0, 8),
    "Q4_K": (_q4_k, 4),
    "Q5_K": (_q5_k, 5),
}
