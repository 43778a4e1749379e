"""Affine grids (codes, scales and biases), and the search for the best one."""

from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx

from ..config.quant_spec import QuantSpec
from ..cpu import on_cpu
from ..cpu.fast_exp import ROUNDER
from . import gpu_kernels
from .backend import compiled, library, round_to_dtype
from .bit_packing import pack_codes, unpack_codes

# Factors by which the range of the weights is shrunk in the search for a start.
SHRINK_FACTORS = (0.96, 0.92, 0.88, 0.83, 0.78, 0.72, 0.65, 0.57, 0.48, 0.38)
LEAST_SQUARES_ITERS = 5


class Grid:
    """A quantized weight [N, K] before its codes are packed.

    A subclass is a frozen dataclass. Its first array has a column for each weight, and
    `scales` has one for each group.
    """

    scales: mx.array

    @property
    def arrays(self) -> dict[str, mx.array]:
        """The arrays, which have N rows each, by name."""
        return {k: v for k, v in vars(self).items() if isinstance(v, mx.array)}

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        codes = next(iter(self.arrays.values()))
        return codes.shape[1] // self.scales.shape[1]

    def __getitem__(self, rows: slice) -> Self:
        """Some of the rows."""
        return replace(self, **{k: v[rows] for k, v in self.arrays.items()})

    def over(self, other: Self, parts: mx.array) -> Self:
        """This grid where the parts [N, M] of rows are True, `other` elsewhere."""
        merged = {}
        for name, value in self.arrays.items():
            mask = mx.repeat(parts, value.shape[1] // parts.shape[1], axis=1)
            merged[name] = mx.where(mask, value, getattr(other, name))
        return replace(self, **merged)


@dataclass(frozen=True)
class AffineGrid(Grid):
    """Codes [N, K], scales [N, G] and biases [N, G], float32, of storable values."""

    codes: mx.array
    scales: mx.array
    biases: mx.array

    def weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dequantized weight [N, K], float32, computed in `dtype`."""
        codes = self.codes.reshape(*self.scales.shape, self.group)
        # Products and sums of two half-precision values that are rounded from float32
        # are those of half-precision arithmetic.
        products = round_to_dtype(codes * self.scales[..., None], dtype)
        weight = round_to_dtype(products + self.biases[..., None], dtype)
        return weight.reshape(self.codes.shape)

    def tensors(self, spec: QuantSpec) -> dict[str, mx.array]:
        """The tensors to store, with float32 scales and biases."""
        codes = pack_codes(self.codes, spec.bits)
        return {"weight": codes, "scales": self.scales, "biases": self.biases}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, mx.array], spec: QuantSpec
    ) -> "AffineGrid":
        """The grid of stored tensors."""
        codes = unpack_codes(tensors["weight"], spec.bits)
        values = codes, tensors["scales"], tensors["biases"]
        return cls(*(value.astype(mx.float32) for value in values))


def safe_scale(scale, levels: float):
    """Scales to divide by, and the highest codes. A scale of 0 gives 1 and 0."""
    where = library(scale).where
    return where(scale == 0, 1.0, scale), where(scale == 0, scale, levels - 1)


def nearest(steps, top):
    """Round to the nearest code in 0 ... `top`, as float."""
    backend = library(steps)
    codes = backend.minimum(backend.maximum(steps, 0), top)
    if backend is not mx:
        return backend.rint(codes)
    # Codes are small enough for this trick, five times faster than rounding on a CPU.
    return (codes + ROUNDER) - ROUNDER if on_cpu() else mx.round(codes)


@gpu_kernels.on_gpu_by(
    "fit_grid", shrink_factors=SHRINK_FACTORS, iterations=LEAST_SQUARES_ITERS
)
def fit_grid(weight, cost, levels: float, dtype: mx.Dtype):
    """Fit scales and biases of groups; a group is a column of the arrays.

    The search starts from many ranges, the full range of the weights among them.
    Alternating least squares then improves the best one: codes for the grid, and the
    grid for the codes. Every grid is evaluated as it is stored, so the result is never
    worse than the full range.

    Args:
        weight: float32 [g, N], MLX or NumPy. Operations on N groups side by side are
            several times faster on a CPU than on one.
        cost: float32 [g], of a squared error in each row.
        levels: number of codes.
        dtype: dtype that scales and biases are stored in.

    Returns:
        Scales and biases, float32 [N], of values that `dtype` can represent.
    """
    low, high = weight.min(axis=0), weight.max(axis=0)
    scale = (high - low) / (levels - 1)
    scale, bias = round_to_dtype(scale, dtype), round_to_dtype(low, dtype)
    best = _error(weight, cost, scale, bias, levels), scale, bias
    for shrink in SHRINK_FACTORS:
        candidate = (
            round_to_dtype(shrink * scale, dtype),
            round_to_dtype(shrink * low, dtype),
        )
        best = _better(weight, cost, levels, *best, *candidate)
    for _ in range(LEAST_SQUARES_ITERS):
        scale, bias = _least_squares(weight, cost, levels, *best[1:])
        candidate = round_to_dtype(scale, dtype), round_to_dtype(bias, dtype)
        best = _better(weight, cost, levels, *best, *candidate)
    return best[1:]


def _better(weight, cost, levels, error, scale, bias, other_scale, other_bias):
    other_error = _error(weight, cost, other_scale, other_bias, levels)
    where, is_better = library(weight).where, other_error < error
    pairs = ((other_error, error), (other_scale, scale), (other_bias, bias))
    return tuple(where(is_better, new, old) for new, old in pairs)


def _error(weight, cost, scale, bias, levels):
    divisor, top = safe_scale(scale, levels)
    squares = _squared_errors(weight, 1 / divisor, bias, top)
    return cost @ squares * (divisor * divisor)


@compiled
def _squared_errors(weight, inverse, bias, top):
    steps = (weight - bias) * inverse
    error = steps - nearest(steps, top)
    return error * error


def _least_squares(weight, cost, levels, scale, bias):
    """The best scales and biases for the codes that a grid gives."""
    where = library(weight).where
    share = cost / cost.sum()
    divisor, top = safe_scale(scale, levels)
    codes = _codes(weight, 1 / divisor, bias, top)
    mean_code, mean = share @ codes, share @ weight
    squares, products = _products(weight, codes, mean_code, mean)
    variance, covariance = share @ squares, share @ products
    # If all codes are equal, the scale is free and only the bias matters.
    is_flat = variance == 0
    fitted = where(is_flat, scale, covariance / where(is_flat, 1.0, variance))
    return fitted, mean - fitted * mean_code


@compiled
def _codes(weight, inverse, bias, top):
    return nearest((weight - bias) * inverse, top)


@compiled
def _products(weight, codes, mean_code, mean):
    codes = codes - mean_code
    return codes * codes, codes * (weight - mean)
