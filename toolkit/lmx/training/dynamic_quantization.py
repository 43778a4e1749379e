"""Blockwise dynamic quantization of the moments of an optimizer to 8 bits.

The format is that of bitsandbytes (arXiv 2110.02861). Blocks of 256 values, in the
order of the flattened array, have their absolute maximum as scale. A code is a position
in a sorted map of 256 numbers from -1, or from 0, to 1, which has seven decades:
decade i covers 10^(i-7) to 10^(i-6) with 2^i numbers of each sign at equal distances,
or with 2^(i+1) numbers if all are positive.

As a function of the number, the position is piecewise linear and concave between 0 and
1, so it is the least of a few lines; the other way round it is the greatest of them.
A search in the map would need 256 values per number, or a loop.
"""

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import mlx.core as mx

BLOCK_SIZE = 256
DECADES = 7
# Position of 0 in the signed map.
SIGNED_ZERO = 127


class DynamicCodes(NamedTuple):
    """A quantized array.

    Attributes:
        codes: uint8, positions in the map, in the array's shape.
        absmax: float32 [blocks], the scales.
    """

    codes: mx.array
    absmax: mx.array


class AffineFunction(NamedTuple):
    """y = slope x + intercept."""

    slope: float
    intercept: float

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.slope + self.intercept

    def raised(self, height: float) -> "AffineFunction":
        return AffineFunction(self.slope, self.intercept + height)

    @property
    def inverse(self) -> "AffineFunction":
        return AffineFunction(1 / self.slope, -self.intercept / self.slope)


def positive_map(*, signed: bool) -> list[float]:
    """The numbers of the map from 0 to 1: 129 of the signed map, or 256."""
    numbers = [0.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        top = 10.0 ** (decade - DECADES + 1)
        numbers += [top * (0.1 + 0.9 * (k + 0.5) / count) for k in range(count)]
    return [*numbers, 1.0]


def quantize(values: mx.array, *, signed: bool) -> DynamicCodes:
    """The nearest codes of float32 values of any shape.

    Args:
        signed: False = no value is negative, and only zero gets the code of zero:
            values near zero get the code above it. An update divides by the root of a
            second moment.
    """
    blocks = _blocks(values)
    absmax = mx.abs(blocks).max(axis=1, keepdims=True)
    fractions = blocks / mx.where(absmax > 0, absmax, 1.0)
    # Flat, because kernels with a broadcast array are not vectorized on a CPU.
    codes = _nearest(fractions.reshape(-1), signed)
    return DynamicCodes(_values(codes, values.shape), absmax.reshape(-1))


def zeros(shape: tuple[int, ...], *, signed: bool) -> DynamicCodes:
    """The codes of an array of zeros."""
    codes = mx.full(shape, SIGNED_ZERO if signed else 0, mx.uint8)
    return DynamicCodes(codes, mx.zeros(-(-codes.size // BLOCK_SIZE)))


def dequantize(quantized: DynamicCodes, *, signed: bool) -> mx.array:
    """The float32 values of codes, in their shape."""
    codes = quantized.codes.reshape(-1).astype(mx.float32)
    if signed:
        codes = codes - SIGNED_ZERO
        fractions = mx.sign(codes) * _numbers(mx.abs(codes), signed)
    else:
        fractions = _numbers(codes, signed)
    # Only the last code is above 1 on the line of the highest decade.
    values = mx.minimum(_blocks(fractions), 1.0) * quantized.absmax[:, None]
    return _values(values, quantized.codes.shape)


def _blocks(values: mx.array) -> mx.array:
    """[blocks, 256], the last one padded with zeros."""
    flat = values.reshape(-1)
    if missing := -flat.size % BLOCK_SIZE:
        flat = mx.pad(flat, (0, missing))
    return flat.reshape(-1, BLOCK_SIZE)


def _values(blocks: mx.array, shape: tuple[int, ...]) -> mx.array:
    """An array of this shape without the padding of the last block."""
    return blocks.reshape(-1)[: prod(shape)].reshape(shape)


def _nearest(fractions: mx.array, signed: bool) -> mx.array:
    """The nearest codes, uint8 [blocks, 256], of flat fractions of the scales."""
    starts = _decade_starts(signed)
    steps = sorted({*starts, *(start - 1 for start in starts)})
    # Half a position higher, because the cast below rounds down.
    lines = [_line(step, signed).raised(0.5) for step in steps]
    top = len(positive_map(signed=signed)) - 2
    last = _line(top, signed).raised(0.5)
    # Two kernels, between which a reshape is the border: MLX's compiler fuses a limited
    # number of operations, and would keep an array for each line where it stops.
    positions = _extreme(mx.minimum, lines[4:], mx.abs(fractions))
    positions = mx.minimum(positions, top + 0.5).reshape(-1, BLOCK_SIZE)
    fractions = fractions.reshape(-1, BLOCK_SIZE)
    rest = _extreme(mx.minimum, lines[:4], mx.abs(fractions))
    # The last step of the map is a half one. The signed map has no -1.
    positions = mx.maximum(mx.minimum(positions, rest), last(fractions))
    positions = positions.astype(mx.int32)
    signs = mx.sign(fractions).astype(mx.int32)
    codes = positions * signs + SIGNED_ZERO if signed else mx.maximum(positions, signs)
    return codes.astype(mx.uint8)


def _numbers(positions: mx.array, signed: bool) -> mx.array:
    """Numbers of positions that are counted from that of zero; too high for 1."""
    # Each line has all numbers of a decade; the first one has zero.
    steps = [0, *_decade_starts(signed)[signed:]]
    lines = [_line(step, signed).inverse for step in steps]
    return _extreme(mx.maximum, lines, positions)


def _decade_starts(signed: bool) -> list[int]:
    """The position of the least number of each decade."""
    return [2**i if signed else 2 ** (i + 1) - 1 for i in range(DECADES)]


@cache
def _line(step: int, signed: bool) -> AffineFunction:
    """The line from the number at a position to the next one."""
    start, end = positive_map(signed=signed)[step : step + 2]
    slope = 1 / (end - start)
    return AffineFunction(slope, step - slope * start)


def _extreme(
    function: Callable[[mx.array, mx.array], mx.array],
    lines: Sequence[AffineFunction],
    x: mx.array,
) -> mx.array:
    """The extreme of lines at x, as a balanced tree: the compiler limits the depth."""
    if len(lines) == 1:
        return lines[0](x)
    middle = len(lines) // 2
    parts = [_extreme(function, half, x) for half in (lines[:middle], lines[middle:])]
    return function(*parts)
