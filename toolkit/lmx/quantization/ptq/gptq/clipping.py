"""Round the weights of every row to nearest, in ranges that are clipped by group.

A group's range gets the least error of its output on the calibration inputs: of shares
of the full range (AWQ, arXiv 2306.00978, section 3.3), and of a range that is fitted to
the diagonal of the Hessian. Other groups do not compensate for an error. Every row
keeps the best of this and RTN.
"""

import mlx.core as mx

from ....config.quant_spec import QuantSpec
from ...affine_grid import AffineGrid, Grid
from ...float_grid import FloatGrid, fit_float_groups
from ...gguf_grid import FORMATS, round_to_nearest
from ...packing import pack
from ..hessian import Hessian
from .column_updates import BestGridTracker
from .gguf_solver import fit_blocks
from .solver import fit_groups

# Shares of the largest magnitude of a group at which its weights are clipped.
CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)


def clip_rows(
    weight: mx.array,
    target: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    refine_iters: int = 0,
) -> BestGridTracker:
    """The best clipped grid of every row, in place of `solver.solve_rows`."""
    matrix, dtype = hessian.matrix, mx.float32 if spec.is_gguf else dtype
    best = BestGridTracker(target, matrix, dtype)
    best.add_grid("RTN", round_rows(weight, spec, dtype))
    grid = fitted_rows(target, mx.diagonal(matrix), spec, dtype)
    errors = _group_errors(grid, target, matrix, dtype)
    groups = target.reshape(len(target), -1, spec.group_size)
    largest = mx.abs(groups).max(axis=-1, keepdims=True)
    for share in CLIPS:
        clipped = mx.clip(groups, -share * largest, share * largest)
        other = round_rows(clipped.reshape(target.shape), spec, dtype)
        other_errors = _group_errors(other, target, matrix, dtype)
        grid = other.over(grid, other_errors < errors)
        errors = mx.minimum(errors, other_errors)
        mx.eval(errors, grid.arrays)
    best.add_grid("clipped", grid)
    best.candidates["best"] = best.errors
    return best


def round_rows(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> Grid:
    """The grid of RTN for a weight [N, K]."""
    if spec.is_gguf:
        return round_to_nearest(weight.astype(mx.float32), FORMATS[spec.mode])
    grid = AffineGrid if spec.mode == "affine" else FloatGrid
    return grid.from_tensors(pack(weight, spec, dtype), spec)


def fitted_rows(
    target: mx.array, costs: mx.array, spec: QuantSpec, dtype: mx.Dtype
) -> Grid:
    """The grid of least error in each group, if errors of columns are independent.

    Args:
        target: float32 [N, K].
        costs: float32 [K], of a squared error in each column.
    """
    if spec.is_gguf:
        return fit_blocks(target, costs, FORMATS[spec.mode])
    if spec.mode == "affine":
        return fit_groups(target, costs, spec.group_size, 2.0**spec.bits, dtype)
    return fit_float_groups(target, costs, spec)


def _group_errors(
    grid: Grid, target: mx.array, matrix: mx.array, dtype: mx.Dtype
) -> mx.array:
    """Errors [N, M] of the outputs of groups; of blocks, if groups share values."""
    count = min(value.shape[1] for value in grid.arrays.values())
    size = target.shape[1] // count
    starts = range(0, target.shape[1], size)
    parts = mx.stack([matrix[s : s + size, s : s + size] for s in starts])
    changes = (grid.weight(dtype) - target).reshape(len(target), count, size)
    changes = changes.swapaxes(0, 1)
    return ((changes @ parts) * changes).sum(axis=-1).T
