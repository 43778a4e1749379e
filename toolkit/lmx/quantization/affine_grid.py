"""Grids: codes, scales and biases, and those of a group that lose least."""

from dataclasses import dataclass, fields

import mlx.core as mx

from ..cpu import on_cpu
from ..cpu.fast_exp import ROUNDER
from .backend import compiled, library, round_to_dtype

# How far the ends of the weights' range are drawn in, as a share of it.
SHRINKS = (0.96, 0.92, 0.88, 0.83, 0.78, 0.72, 0.65, 0.57, 0.48, 0.38)
ROUNDS = 5


@dataclass(frozen=True)
class AffineGrid:
    """Codes [N, K], scales and biases [N, G]: float32, of values that can be stored."""

    codes: mx.array
    scales: mx.array
    biases: mx.array

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """What the codes stand for [N, K], by arithmetic in `dtype`."""
        shape = (*self.scales.shape, self.group)
        codes = self.codes.reshape(shape).astype(dtype)
        scales, biases = (
            v[..., None].astype(dtype) for v in (self.scales, self.biases)
        )
        return (codes * scales + biases).reshape(self.codes.shape).astype(mx.float32)

    def over(self, other: "AffineGrid", rows: mx.array) -> "AffineGrid":
        """This in the rows that are True, the other elsewhere."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return AffineGrid(*(mx.where(rows[:, None], a, b) for a, b in pairs))


def safe_scale(scale, levels: float):
    """Scales to divide by, and the highest codes; where one is 0 they are 1 and 0."""
    where = library(scale).where
    return where(scale == 0, 1.0, scale), where(scale == 0, scale, levels - 1)


def nearest(steps, top):
    """The whole numbers 0 ... top, as floats, nearest to some."""
    its = library(steps)
    codes = its.minimum(its.maximum(steps, 0), top)
    if its is not mx:
        return its.rint(codes)
    # They are small enough for what is five times faster than rounding on a CPU.
    return (codes + ROUNDER) - ROUNDER if on_cpu() else mx.round(codes)


def fit_grid(weight, cost, levels: float, dtype: mx.Dtype):
    """Scales and biases of groups, a column of an array each.

    The best of many starts, the range from the smallest to the largest weight among
    them, is improved by least squares: codes for the grid, then the grid for the codes.
    Every grid is judged as it will be stored, so none is worse than the plain range.

    Args:
        weight: float32 [g, N], of MLX or NumPy: numbers of N grids side by side are
            several times as fast on a CPU as those of one.
        cost: float32 [g], of a squared error in each row.
        levels: codes of the grid.
        dtype: the type scales and biases are stored in.

    Returns:
        Both float32 [N], of values that `dtype` has.
    """
    low, high = weight.min(axis=0), weight.max(axis=0)
    scale = (high - low) / (levels - 1)
    scale, bias = round_to_dtype(scale, dtype), round_to_dtype(low, dtype)
    best = _error(weight, cost, scale, bias, levels), scale, bias
    for shrink in SHRINKS:
        tried = (
            round_to_dtype(shrink * scale, dtype),
            round_to_dtype(shrink * low, dtype),
        )
        best = _better(weight, cost, levels, *best, *tried)
    for _ in range(ROUNDS):
        scale, bias = _least_squares(weight, cost, levels, *best[1:])
        tried = round_to_dtype(scale, dtype), round_to_dtype(bias, dtype)
        best = _better(weight, cost, levels, *best, *tried)
    return best[1:]


def _better(weight, cost, levels, least, scale, bias, other_scale, other_bias):
    error = _error(weight, cost, other_scale, other_bias, levels)
    where, is_better = library(weight).where, error < least
    pairs = ((error, least), (other_scale, scale), (other_bias, bias))
    return tuple(where(is_better, new, old) for new, old in pairs)


def _error(weight, cost, scale, bias, levels):
    unit, top = safe_scale(scale, levels)
    return cost @ _squares(weight, 1 / unit, bias, top) * (unit * unit)


@compiled
def _squares(weight, inverse, bias, top):
    steps = (weight - bias) * inverse
    off = steps - nearest(steps, top)
    return off * off


def _least_squares(weight, cost, levels, scale, bias):
    """The best grid for the codes that a grid gives."""
    where = library(weight).where
    share = cost / cost.sum()
    unit, top = safe_scale(scale, levels)
    codes = _codes(weight, 1 / unit, bias, top)
    mean_code, mean = share @ codes, share @ weight
    squares, products = _products(weight, codes, mean_code, mean)
    spread, together = share @ squares, share @ products
    # Where all codes are one, the scale is free and the bias alone decides.
    is_flat = spread == 0
    fitted = where(is_flat, scale, together / where(is_flat, 1.0, spread))
    return fitted, mean - fitted * mean_code


@compiled
def _codes(weight, inverse, bias, top):
    return nearest((weight - bias) * inverse, top)


@compiled
def _products(weight, codes, mean_code, mean):
    codes = codes - mean_code
    return codes * codes, codes * (weight - mean)
