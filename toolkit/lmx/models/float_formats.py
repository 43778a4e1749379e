"""Grids of MLX's floating-point modes: mxfp4, nvfp4 and mxfp8.

An element is a small floating-point number, E2M1 or E4M3, and a group of elements
shares an 8-bit scale: E8M0, a power of two, in the mx modes (OCP Microscaling Formats
v1.0), E4M3 in nvfp4. The scale is positive and there is no bias.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx

from ..cpu import on_cpu

EXPONENT_MASK, FRACTION_BITS = 0x7F800000, 23


def library(array) -> ModuleType:
    """The library of an array: `mlx.core` or `numpy`."""
    if isinstance(array, mx.array):
        return mx
    # Imported on first use, because reading a recipe imports this module.
    import numpy

    return numpy


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point number of 4 or 8 bits with a sign.

    Attributes:
        bits: of a code.
        fraction_bits: of the significand, without the leading bit.
        min_normal: the least normal value; smaller ones have its spacing.
        max: the largest value.
    """

    bits: int
    fraction_bits: int
    min_normal: float
    max: float

    def nearest(self, values, top):
        """The nearest representable values, ties to even, as float32.

        Args:
            values: float32, MLX or NumPy.
            top: bound of the magnitude, a representable value.
        """
        backend = library(values)
        values = backend.minimum(backend.maximum(values, -top), top)
        bits = values.view(backend.uint32) & EXPONENT_MASK
        exponents = backend.maximum(bits.view(backend.float32), self.min_normal)
        if backend is mx and not on_cpu():
            spacing = exponents * 2.0**-self.fraction_bits
            return mx.round(values / spacing) * spacing
        # Float32 values near this one have the spacing of the format.
        rounder = exponents * (1.5 * 2.0 ** (FRACTION_BITS - self.fraction_bits))
        return (values + rounder) - rounder

    def codes(self, values: mx.array) -> mx.array:
        """Codes, uint8, of representable values: sign, exponent and fraction bits.

        Zero has one code. `nearest` makes negative zeros on a GPU.
        """
        if self.bits == 8:
            return mx.to_fp8(mx.where(values == 0, 0.0, values))
        steps = mx.abs(values)
        # Codes 0 ... 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6: the spacing doubles twice.
        codes = mx.minimum(2 * steps, mx.minimum(steps + 2, steps / 2 + 4))
        return codes.astype(mx.uint8) | mx.where(values < 0, 8, 0).astype(mx.uint8)

    def values(self, codes: mx.array) -> mx.array:
        """Float32 values of codes; the inverse of `codes`."""
        if self.bits == 8:
            return mx.from_fp8(codes.astype(mx.uint8), dtype=mx.float32)
        steps = (codes & 7).astype(mx.float32)
        values = mx.maximum(steps / 2, mx.maximum(steps - 2, 2 * steps - 8))
        return mx.where(codes >= 8, -values, values)


E2M1 = FloatFormat(bits=4, fraction_bits=1, min_normal=1.0, max=6.0)
E4M3 = FloatFormat(bits=8, fraction_bits=3, min_normal=2.0**-6, max=448.0)


class PowerOfTwoScales:
    """E8M0 scales: the exponent of a power of two with a bias of 127."""

    # Offsets from the code of the full range that a search tries.
    SEARCH = (0, -1, 1)
    # Code 0 is a subnormal float32, and 255 is NaN.
    MIN_CODE, MAX_CODE = 1, 254

    @staticmethod
    def codes(scales: mx.array) -> mx.array:
        """Codes, int32, of the least powers of two that are not below the scales."""
        bits = scales.view(mx.uint32) + (2**FRACTION_BITS - 1)
        return (bits >> FRACTION_BITS).astype(mx.int32)

    @classmethod
    def values(cls, codes: mx.array) -> mx.array:
        """Float32 scales of codes. Those of code 0 are twice as large as stored."""
        codes = mx.maximum(codes.astype(mx.uint32), cls.MIN_CODE)
        return (codes << FRACTION_BITS).view(mx.float32)


class E4M3Scales:
    """E4M3 scales. Those below 2^-6 are coarse multiples of 2^-9."""

    # From a clipped range to one whose largest element is 4 in place of 6, which has
    # finer neighbors.
    SEARCH = (0, -3, -2, -1, 1, 2, 3, 4, 5)
    # Code 127 is NaN.
    MIN_CODE, MAX_CODE = 1, 126

    @staticmethod
    def codes(scales: mx.array) -> mx.array:
        """Codes, int32, of the nearest scales; `scales` >= 0."""
        return mx.to_fp8(scales).astype(mx.int32)

    @staticmethod
    def values(codes: mx.array) -> mx.array:
        """Float32 scales of codes from 0 to 126."""
        return mx.from_fp8(codes.astype(mx.uint8), dtype=mx.float32)


@dataclass(frozen=True)
class FloatMode:
    """A mode of `mx.quantize`: the format of its elements and of its scales."""

    elements: FloatFormat
    scales: type[PowerOfTwoScales] | type[E4M3Scales]

    def range_codes(self, largest: mx.array) -> mx.array:
        """Scale codes, int32, of `mx.quantize` for the largest magnitudes of groups."""
        return self.scales.codes(largest / self.elements.max)

    def candidates(self, codes: mx.array, offsets: tuple[int, ...]) -> mx.array:
        """Scales [offsets, N] whose codes differ from codes [N] by the offsets."""
        codes = codes[None] + mx.array(offsets, mx.int32)[:, None]
        limits = self.scales.MIN_CODE, self.scales.MAX_CODE
        return self.scales.values(mx.clip(codes, *limits))


MODES = {
    "mxfp4": FloatMode(E2M1, PowerOfTwoScales),
    "nvfp4": FloatMode(E2M1, E4M3Scales),
    "mxfp8": FloatMode(E4M3, PowerOfTwoScales),
}


def straight_through(
    function: Callable[[mx.array], mx.array],
) -> Callable[[mx.array], mx.array]:
    """`function` with the identity as its gradient (arXiv 1308.3432).

    A custom gradient, because w + stop_gradient(f(w) - w) is not f(w) in 16 bits.
    """

    @mx.custom_function
    def forward(value: mx.array) -> mx.array:
        return function(value).astype(value.dtype)

    @forward.vjp
    def _(_, cotangent, __):
        return cotangent

    return forward
