"""ggml's K blocks of 256 weights as codes, and back to bytes.

Q4_K and Q5_K have eight groups of 32, Q3_K and Q6_K have sixteen groups of 16 without
minima; see `quantization/gguf_grid`. A checkpoint of MLX holds the scales of Q4_K and
Q5_K as products of a step and an integer, `factors` finds both again: any pair gives
the same weights. Those of Q3_K and Q6_K are beside it; see `models.gguf_scales`.
"""

from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...models import gguf_scales
from ...models.safetensors_io import read_tensors
from ...quantization.gguf_grid import FORMATS
from .reader import GGUFTensor

BLOCK = 256
# Weights of a group in Q3_K and Q6_K.
GROUP = 16
# Rows of a matrix that decide its type. Rows of zeros fit every type.
ROWS = 4
# Weights that are encoded at once.
CHUNK = 1 << 22
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
# Steps of blocks, and integer scales of groups.
Factors = tuple[np.ndarray, np.ndarray]


def float16_at(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 [..., 1] at a byte of every block."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes [..., 2 n] of bytes [..., n]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def q4_k(blocks: np.ndarray) -> Parts:
    """Codes [..., 8, 32], scales and biases of Q4_K."""
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return nibbles(pairs), *_scales_and_biases(blocks)


def q5_k(blocks: np.ndarray) -> Parts:
    """Codes [..., 8, 32], scales and biases of Q5_K."""
    pairs = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    # A byte holds the fifth bits of the codes at its position in all eight groups.
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> shifts) & 1
    fifth = fifth.reshape(*blocks.shape[:-1], 4, 64) << 4
    return nibbles(pairs) | fifth, *_scales_and_biases(blocks)


def _scales_and_biases(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and biases float32 [..., 8] of a block of Q4_K or Q5_K.

    The block starts with d, m and twelve bytes of 6-bit scales and minima.
    """
    from gguf.quants import Q4_K

    packed = np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12)
    values = Q4_K.get_scale_min(packed)
    scales, minima = (v.reshape(*blocks.shape[:-1], 8) for v in values)
    d, m = (float16_at(blocks, start).astype(np.float32) for start in (0, 2))
    return d * scales, -m * minima


def from_groups(
    codes: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int
) -> tuple[str, np.ndarray] | None:
    """Q4_K or Q5_K, and the bytes [rows, bytes of a row], of groups of 32.

    Args:
        codes: uint8 [rows, groups, 32].
        scales, biases: float32 [rows, groups].

    Returns:
        None if these types do not hold the scales or biases.
    """
    rows, groups = scales.shape
    if bits not in (4, 5) or groups % 8:
        return None
    form = FORMATS[f"q{bits}_k"]
    by_block = [value.reshape(-1, 8) for value in (scales, -biases)]
    # Most groups are in no K block: the first ones tell.
    if factors(by_block[0][:1], form.scales) is None:
        return None
    steps = [factors(values, form.scales) for values in by_block]
    if any(pair is None for pair in steps):
        return None
    (d, sc), (m, minima) = steps
    codes, sc, minima = codes.reshape(-1, 8, 32), _bytes(sc), _bytes(minima)
    packed = [
        _half_bytes(d),
        _half_bytes(m),
        sc[:, :4] | (sc[:, 4:] >> 4 << 6),
        minima[:, :4] | (minima[:, 4:] >> 4 << 6),
        (sc[:, 4:] & 15) | (minima[:, 4:] & 15) << 4,
    ]
    if bits == 5:
        packed.append(np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0])
    low = codes & 15
    packed.append((low[:, ::2] | low[:, 1::2] << 4).reshape(-1, 128))
    return f"Q{bits}_K", np.concatenate(packed, axis=-1).reshape(rows, -1)


def layer_factors(
    stored: dict[str, mx.array], path: str, shape: tuple[int, ...]
) -> Factors | None:
    """The factors, float32, of a weight of this shape, if `models.gguf_scales` has
    them."""
    names = [f"{path}.{name}" for name in (gguf_scales.STEPS, gguf_scales.SCALES)]
    if not all(name in stored for name in names):
        return None
    *rows, width = shape
    steps, scales = (np.array(stored[name].astype(mx.float32)) for name in names)
    is_same = steps.shape == (*rows, width / BLOCK)
    is_same &= scales.shape == (*rows, width / GROUP)
    return (steps, scales) if is_same else None


def stored_factors(tensor: GGUFTensor) -> dict[str, np.ndarray]:
    """Steps and integer scales of Q3_K and Q6_K by their names in a checkpoint; none of
    other types."""
    blocks = tensor.blocks
    if tensor.ggml_type == "Q6_K":
        start, scales = 208, np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    elif tensor.ggml_type == "Q3_K":
        start, low = 108, nibbles(blocks[..., 96:104])
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        high = (blocks[..., None, 104:108] >> shifts) & 3
        scales = (low | high.reshape(low.shape) << 4).astype(np.int8) - np.int8(32)
    else:
        return {}
    rows = tensor.shape[:-1]
    return {
        gguf_scales.STEPS: float16_at(blocks, start).reshape(*rows, -1),
        gguf_scales.SCALES: scales.reshape(*rows, -1),
    }


def from_factors(
    weight: np.ndarray, steps: np.ndarray, scales: np.ndarray
) -> tuple[str, np.ndarray] | None:
    """Q3_K or Q6_K, and the bytes [..., bytes of a row], of float32 [..., K].

    Args:
        steps, scales: float32 [..., blocks] and [..., groups].

    Returns:
        None if the factors are not those of the weight, which has changed.
    """
    rows, steps = weight.shape[:-1], steps.reshape(-1)
    weight, scales = weight.reshape(-1, 16, GROUP), scales.reshape(-1, 16)
    for mode, encode in (("q3_k", _q3_k_bytes), ("q6_k", _q6_k_bytes)):
        middle, (low, high) = int(FORMATS[mode].middle), FORMATS[mode].scales
        if scales.min() < low or scales.max() > high:
            continue
        encoded = []
        for start in range(0, len(weight), CHUNK // BLOCK):
            part = slice(start, start + CHUNK // BLOCK)
            products = (steps[part, None] * scales[part])[..., None]
            codes = np.rint(weight[part] / np.where(products == 0, 1, products))
            is_known = (codes * products == weight[part]).all()
            if not is_known or codes.min() < -middle or codes.max() >= middle:
                break
            encoded.append(encode(steps[part], scales[part], codes + middle))
        else:
            return mode.upper(), np.concatenate(encoded).reshape(*rows, -1)
    return None


def _q6_k_bytes(d: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    codes = _bytes(codes).reshape(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    low = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    high = _packed_pairs(high).reshape(-1, 64)
    scales = scales.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, scales, _half_bytes(d)], axis=-1)


def _q3_k_bytes(d: np.ndarray, scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    codes, scales = _bytes(codes).reshape(-1, 8, 32), _bytes(scales + 32)
    high = np.packbits(codes >> 2, axis=1, bitorder="little")[:, 0]
    low = _packed_pairs((codes & 3).reshape(-1, 2, 4, 32)).reshape(-1, 64)
    first = (scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4
    last = _packed_pairs((scales >> 4).reshape(-1, 4, 4))
    return np.concatenate([high, low, first, last, _half_bytes(d)], axis=-1)


def _packed_pairs(values: np.ndarray) -> np.ndarray:
    """Bytes [..., n] of pairs of bits [..., 4, n], the lowest pairs first."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(values << shifts, axis=-2)


def _bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint8)


def _half_bytes(steps: np.ndarray) -> np.ndarray:
    return steps.astype(np.float16)[:, None].view(np.uint8)


def factors(
    values: np.ndarray, limits: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """A float16 step of every row, and integers in the limits, whose products are the
    values, float32 [rows, n].

    Returns:
        Steps [rows], float64, and integers [rows, n]; None if a row has no factors.
    """
    if not np.isfinite(values).all():
        return None
    values = values.astype(np.float64)
    extremes = np.abs(values).argmax(axis=-1, keepdims=True)
    extremes = np.take_along_axis(values, extremes, axis=-1)[:, 0]
    steps, left = np.zeros(len(values)), extremes != 0
    for largest in range(1, limits[1] + 1):
        step = extremes[left] / largest
        with np.errstate(over="ignore"):
            fits = step.astype(np.float16).astype(np.float64) == step
        integers = values[left] / step[:, None]
        is_whole = integers == np.rint(integers)
        in_limits = (integers >= limits[0]) & (integers <= limits[1])
        fits &= (is_whole & in_limits).all(axis=-1)
        rows = np.flatnonzero(left)[fits]
        steps[rows], left[rows] = step[fits], False
    if left.any():
        return None
    safe = np.where(steps == 0, 1.0, steps)[:, None]
    return steps, np.rint(values / safe).astype(np.int64)


def count_layers(folder: Path) -> Counter[str]:
    """Number of dense layers whose weights are those of Q3_K or Q6_K, by type.

    The first rows of every layer tell whether the factors are still those of it.

    Args:
        folder: of safetensors files in MLX's format.

    Raises:
        UserError: a file is damaged.
    """
    stored, types = gguf_scales.read(folder), Counter[str]()
    for file in sorted(folder.glob("model*.safetensors")) if stored else ():
        for name, weight in read_tensors(file).items():
            path, _, leaf = name.rpartition(".")
            factors = layer_factors(stored, path, weight.shape)
            if leaf != "weight" or weight.dtype != mx.float32 or not factors:
                continue
            parts = np.array(weight), *factors
            rows, *factors = (v.reshape(-1, v.shape[-1])[:ROWS] for v in parts)
            blocks = from_factors(rows, *factors) if rows.any() else None
            types.update([blocks[0]] if blocks else [])
    return types
