"""The blocks of ggml's types as MLX's groups, or as dense numbers where MLX has none.

d and m are float16. 32 weights share a scale: Q4_0, Q5_0 and Q8_0 are
d * (code - middle); Q4_1 and Q5_1 are d * code + m; Q4_K and Q5_K are blocks of eight
such groups, d * scale * code - m * minimum, with 6-bit scales and minima, and float32
holds the products. Q6_K's groups of 16 are too small for MLX: they become dense
float32, which holds d * scale * (code - 32) exactly.
"""

import mlx.core as mx
import numpy as np

from ..importers.affine_repack import Groups, exact, pack
from .reader import Tensor

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def groups(tensor: Tensor) -> Groups | None:
    """A quantized matrix in groups of 32; None for types that MLX has no groups for."""
    if tensor.kind not in GROUPED:
        return None
    split, bits = GROUPED[tensor.kind]
    codes, scales, biases = split(tensor.blocks)
    rows, width = tensor.shape[0], tensor.shape[-1]
    words = pack(mx.array(codes.reshape(rows, width)), bits)
    mx.eval(words)
    exactly = exact(
        mx.array(scales.reshape(rows, -1)),
        mx.array(biases.reshape(rows, -1).astype(np.float32)),
    )
    return Groups(words, *exactly, np.arange(width) // 32, bits)


def dense(tensor: Tensor) -> mx.array:
    """A tensor's numbers; float32 ones in 16 bits where that changes none."""
    if tensor.kind == "BF16":
        bits = mx.array(np.ascontiguousarray(tensor.blocks).view(np.uint16))
        return bits.view(mx.bfloat16).reshape(tensor.shape)
    if tensor.kind == "Q6_K":
        return mx.array(_six_bits(tensor.blocks).reshape(tensor.shape))
    number = {"F32": np.float32, "F16": np.float16}[tensor.kind]
    values = mx.array(np.ascontiguousarray(tensor.blocks).view(number))
    return _narrowest(values.reshape(tensor.shape))


def _narrowest(values: mx.array) -> mx.array:
    # Norms are stored as float32 always, and would make a model compute in it.
    for dtype in (mx.float16, mx.bfloat16):
        narrow = values.astype(dtype)
        if mx.array_equal(narrow.astype(values.dtype), values):
            return narrow
    return values


def _float16(blocks: np.ndarray, start: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes [..., 2 n] of bytes [..., n]: the low halves, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(words: np.ndarray) -> np.ndarray:
    """The bits [..., 32] of four bytes, where codes of five bits have their highest."""
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
    # int8 plus 128 is the same byte with its highest bit turned.
    return blocks[..., 2:] ^ 128, scale, -128 * scale.astype(np.float32)


def _q4_k(blocks: np.ndarray) -> Parts:
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return _nibbles(pairs), *_small_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Parts:
    pairs = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    # A byte holds the fifth bits of the codes at its place in all eight groups.
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts) & 1
    fifth = fifth.reshape(*blocks.shape[:-1], 4, 64) << 4
    return _nibbles(pairs) | fifth, *_small_scales(blocks)


def _small_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases float32 [..., 8] of a block: d, m, then twelve bytes of six
    bits each, the scales and the minima of four groups, then of four more, whose
    highest bits are above those of the first four."""
    low = blocks[..., 4:8], blocks[..., 8:12]
    rest = blocks[..., 12:16]
    scales = np.concatenate([low[0] & 63, (rest & 15) | (low[0] >> 6 << 4)], axis=-1)
    minima = np.concatenate([low[1] & 63, (rest >> 4) | (low[1] >> 6 << 4)], axis=-1)
    step, least = (_float16(blocks, place).astype(np.float32) for place in (0, 2))
    return step * scales, -least * minima


def _six_bits(blocks: np.ndarray) -> np.ndarray:
    """Float32 [..., 256] of Q6_K: low halves, high pairs of bits, int8 scales, d."""
    halves = (*blocks.shape[:-1], 2)
    low = blocks[..., :128].reshape(*halves, 64)
    high = blocks[..., 128:192].reshape(*halves, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    pairs = ((high[..., None, :] >> shifts) & 3).reshape(*halves, 128)
    codes = (_nibbles(low) | (pairs << 4)).astype(np.float32) - 32
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    steps = _float16(blocks, 208).astype(np.float32) * scales
    return codes.reshape(*blocks.shape[:-1], 16, 16) * steps[..., None]


# How a type's blocks split into codes, scales and biases, and the width of its codes.
GROUPED = {
    "Q4_0": (_q4_0, 4),
    "Q4_1": (_q4_1, 4),
    "Q5_0": (_q5_0, 5),
    "Q5_1": (_q5_1, 5),
    "Q8_0": (_q8_0, 8),
    "Q4_K": (_q4_k, 4),
    "Q5_K": (_q5_k, 5),
}
