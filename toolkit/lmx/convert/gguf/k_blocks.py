"""ggml's K blocks of 256 weights as codes, and back to bytes.

Q4_K and Q5_K have eight groups of 32, Q3_K and Q6_K have sixteen groups of 16 without
minima; see `quantization/gguf_grid`. A checkpoint of MLX holds products of a step and
an integer, `factors` finds both again. Any pair of factors gives the same weights.
"""

from collections import Counter
from pathlib import Path

import numpy as np

from ...models.safetensors_io import read_header
from ...quantization.gguf_grid import FORMATS, BlockFormat

BLOCK = 256
# Rows of a matrix that decide its type. Rows of zeros fit every type.
ROWS = 4
# Weights whose factors are found at once.
CHUNK = 1 << 22
# The exponent of a row of zeros, and bits of the products in a block at most.
EMPTY, MAX_BITS = 1 << 20, 40
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


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


def from_weights(weight: np.ndarray) -> tuple[str, np.ndarray] | None:
    """Q3_K or Q6_K, and the bytes [rows, bytes of a row], of float32 [rows, K].

    Returns:
        None if neither type holds these weights exactly.
    """
    rows, width = weight.shape
    if width % BLOCK:
        return None
    blocks = weight.reshape(-1, 16, 16)
    for mode, encode in (("q3_k", _q3_k_bytes), ("q6_k", _q6_k_bytes)):
        form, encoded = FORMATS[mode], []
        # Most weights are on no grid: the first block tells.
        starts = [0, *range(1, len(blocks), CHUNK // BLOCK)]
        for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
            parts = group_factors(blocks[start:end], form)
            if parts is None:
                break
            encoded.append(encode(*parts))
        else:
            return mode.upper(), np.concatenate(encoded).reshape(rows, -1)
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
    whole = _as_integers(values)
    if whole is None:
        return None
    integers, unit = whole
    common = np.gcd.reduce(integers, axis=-1)
    # The limits of minima and scales begin at 0: their common sign is the step's.
    common = np.where(integers.max(axis=-1) > 0, common, -common)
    steps, left = np.zeros(len(values)), common != 0
    for divisor in range(1, limits[1] + 1):
        step = common[left] * unit[left] / divisor
        scales = values[left] / np.where(step == 0, 1.0, step)[:, None]
        fits = _is_float16(step) & _within(scales, *limits)
        rows = np.flatnonzero(left)[fits]
        steps[rows], left[rows] = step[fits], False
        if not left.any():
            safe = np.where(steps == 0, 1.0, steps)[:, None]
            return steps, np.rint(values / safe).astype(np.int64)
    return None


def group_factors(
    values: np.ndarray, form: BlockFormat
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """A step of every block, scales of its groups, and codes, whose products
    step * scale * (code - middle) are the values, float32 [blocks, groups, n].

    Returns:
        Steps [blocks], float64, integer scales [blocks, groups] and codes; None if a
        block has no factors.
    """
    whole = _as_integers(values.reshape(len(values), -1))
    if whole is None:
        return None
    integers, unit = whole[0].reshape(values.shape), whole[1]
    by_group = np.gcd.reduce(integers, axis=-1)
    common = np.gcd.reduce(by_group, axis=-1)
    middle = int(form.middle)
    codes = integers // np.where(by_group == 0, 1, by_group)[..., None]
    multiples = by_group // np.where(common == 0, 1, common)[:, None]
    steps, scales = np.zeros(len(values)), np.zeros(by_group.shape, np.int64)
    left = common != 0
    # The common divisor may be the step times a divisor of all scales and codes.
    for divisor in range(1, middle * -form.scales[0] + 1):
        rows = np.flatnonzero(left)
        if not len(rows):
            break
        step = common[rows] * unit[rows] / divisor
        rows, step = rows[_is_float16(step)], step[_is_float16(step)]
        if not len(rows):
            continue
        chosen = _group_scales(multiples[rows] * divisor, codes[rows], form)
        fits = ((chosen != 0) | (by_group[rows] == 0)).all(axis=-1)
        rows = rows[fits]
        steps[rows], scales[rows], left[rows] = step[fits], chosen[fits], False
    if left.any():
        return None
    products = (steps[:, None] * scales)[..., None]
    codes = values / np.where(products == 0, 1.0, products) + middle
    return steps, scales, np.rint(codes).astype(np.int64)


def _group_scales(
    products: np.ndarray, codes: np.ndarray, form: BlockFormat
) -> np.ndarray:
    """Scales [blocks, groups] that divide the products of scale and code multiple; 0
    where none has codes in the range.

    Args:
        codes: [blocks, groups, n], around 0, to multiply by a whole number.
    """
    middle, (lowest, highest) = int(form.middle), form.scales
    low, high = codes.min(axis=-1), codes.max(axis=-1)
    scales = np.zeros(products.shape, np.int64)
    for multiple in range(1, middle + 1):
        for sign in (1, -1):
            ends = (
                np.minimum(sign * low, sign * high),
                np.maximum(sign * low, sign * high),
            )
            scale = sign * (products // multiple)
            fits = (products % multiple == 0) & (scale >= lowest) & (scale <= highest)
            fits &= (ends[0] * multiple >= -middle) & (ends[1] * multiple < middle)
            scales = np.where((scales == 0) & fits, scale, scales)
    return scales


def _as_integers(values: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Rows as whole multiples of a power of two: int64 [rows, n] and float64 [rows].

    None if a value is not finite, or a row has too wide a range for a block.
    """
    if not np.isfinite(values).all():
        return None
    mantissas, exponents = np.frexp(values.astype(np.float64))
    whole = (mantissas * 2.0**24).astype(np.int64)
    lowest = np.where(whole == 0, 0, whole & -whole)
    zeros = np.where(whole == 0, 0, np.log2(np.maximum(lowest, 1)).astype(np.int64))
    places = np.where(whole == 0, EMPTY, exponents - 24 + zeros)
    place = places.min(axis=-1)
    spread = np.where(whole == 0, 0, exponents - place[:, None]).max(axis=-1)
    if (spread > MAX_BITS).any():
        return None
    unit = np.exp2(np.where(place == EMPTY, 0, place).astype(np.float64))
    return np.rint(values / unit[:, None]).astype(np.int64), unit


def _is_float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float64) == values


def _within(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """Whether all values [rows, n] of a row are whole and in the limits."""
    is_whole = values == np.rint(values)
    return (is_whole & (values >= low) & (values <= high)).all(axis=-1)


def count_layers(folder: Path) -> Counter[str]:
    """Number of dense layers whose weights are those of Q3_K or Q6_K, by type.

    MLX has no groups of 16, so a checkpoint holds such weights in float32. Its config
    does not tell them from unquantized ones; the first rows of every matrix do.

    Args:
        folder: of safetensors files in MLX's format.

    Raises:
        UserError: a file is damaged.
    """
    from safetensors import safe_open

    types: Counter[str] = Counter()
    for file in sorted(folder.glob("model*.safetensors")):
        header = read_header(file)
        with safe_open(file, "numpy") as tensors:
            for name, (dtype, shape) in header.items():
                if dtype != "F32" or len(shape) != 2:
                    continue
                rows = tensors.get_slice(name)[: min(ROWS, shape[0])]
                blocks = from_weights(rows) if rows.any() else None
                types.update([blocks[0]] if blocks else [])
    return types
