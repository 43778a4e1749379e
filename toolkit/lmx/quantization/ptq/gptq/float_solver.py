"""GPTQ on the grids of floating-point modes, with a search of the block scales.

There are few scales to choose from, and a bias to absorb their error is missing. So the
scale of a group is not fitted: the columns of the group are quantized with each
candidate, and the scale with the least error is kept. The error is that of the layer's
output with the Hessian of the group, as later groups compensate for the rest of it.
"""

import mlx.core as mx

from ....config.quant_spec import QuantSpec
from ....models.float_formats import MODES, FloatMode
from ...backend import async_eval, library, to_fast_backend
from ...float_grid import FloatGrid
from ...packing import pack
from ..hessian import Hessian, group_factors
from .column_updates import (
    BestGridTracker,
    descent_columns,
    gptq_columns,
    group_errors,
    stack_groups,
    take_candidate,
)

# Offsets from the code of a group's scale that a refinement tries.
NEIGHBORS = (0, -1, 1)


def solve_float_rows(
    weight: mx.array,
    target: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    refine_iters: int,
) -> BestGridTracker:
    """The best grid of every row for a target, float32 [N, K].

    Args:
        weight: [N, K], which RTN rounds.
        refine_iters: sweeps of `group_descent`.
    """
    mode = MODES[spec.mode]
    best = BestGridTracker(target, hessian.matrix, dtype)
    best.add_grid("RTN", FloatGrid.from_tensors(pack(weight, spec, dtype), spec))
    best.add_grid("GPTQ", float_gptq(target, hessian, spec))
    for iteration in range(refine_iters):
        grid = group_descent(best.grid, best.descent, hessian.matrix, mode)
        best.add_grid(f"refined {iteration + 1}", grid)
    best.candidates["best"] = best.errors
    return best


def float_gptq(target: mx.array, hessian: Hessian, spec: QuantSpec) -> FloatGrid:
    """Quantize group by group. Later columns compensate for the error of each.

    Columns go in the order of the Hessian, as in `solver.gptq`.
    """
    mode, group_size = MODES[spec.mode], spec.group_size
    factor, order = to_fast_backend(hessian.factor), hessian.order
    remaining = to_fast_backend(target[:, order].T)
    groups = []
    for start in range(0, len(factor), group_size):
        columns = slice(start, start + group_size)
        rows = remaining[:group_size]
        largest = mx.array(library(rows).abs(rows).max(axis=0))
        scales = mode.candidates(mode.range_codes(largest), mode.scales.SEARCH)
        block = factor[columns, columns]
        elements, errors, scales = _gptq_candidates(rows, block, scales, mode)
        best = (errors * errors).sum(axis=0).argmin(axis=0)
        elements, scale, errors = take_candidate(best, elements, scales, errors)
        spread = factor[columns, start + group_size :].T @ errors
        remaining = remaining[group_size:] - spread
        groups.append((elements, scale))
        async_eval((remaining, *groups[-1]))
    elements, scales = stack_groups(groups)
    by_group = mx.argsort(order[::group_size])
    return FloatGrid(elements[:, mx.argsort(order)], scales[:, by_group])


def _gptq_candidates(rows, factor, scales: mx.array, mode: FloatMode):
    """Elements and errors [g, candidates, N], and scales [candidates, N].

    All candidates are quantized side by side, as rows of one weight.

    Args:
        rows: [g, N], a column of the weight each.
        factor: [g, g], the part of the Hessian's factor for these columns.
        scales: [candidates, N].
    """
    backend, (count, size) = library(rows), scales.shape
    flat = to_fast_backend(scales.reshape(-1))
    elements, errors = gptq_columns(
        backend.concatenate([rows] * count, axis=1),
        factor,
        flat,
        0.0,
        mode.elements.max,
        mode.elements,
    )
    shape = (len(rows), count, size)
    return elements.reshape(shape), errors.reshape(shape), flat.reshape(count, size)


def group_descent(
    grid: FloatGrid, descent: mx.array, matrix: mx.array, mode: FloatMode
) -> FloatGrid:
    """One sweep over all groups: each moves to less error with the others fixed.

    A group is quantized anew by GPTQ with its scale and the scales next to it, and by
    coordinate descent from its codes. It stays as it is if nothing is better.

    Args:
        descent: float32 [N, K], (target - weight) times the matrix.
    """
    size = grid.group
    codes = mode.scales.codes(grid.scales).T
    candidates = mode.candidates(codes.reshape(-1), NEIGHBORS).reshape(-1, *codes.shape)
    factors = group_factors(matrix, size)
    remaining = to_fast_backend(descent.T)
    matrix, old = to_fast_backend(matrix), to_fast_backend(grid.elements.T)
    backend, number = library(remaining), mode.elements
    groups = []
    for index, start in enumerate(range(0, len(old), size)):
        columns = slice(start, start + size)
        rows, block, codes = remaining[:size], matrix[columns, columns], old[columns]
        factor, scales = to_fast_backend(factors[index]), candidates[:, index]
        flat = to_fast_backend(scales[0])
        before = codes * flat
        optimum = before + factor.T @ (factor @ rows)
        elements, _, scales = _gptq_candidates(optimum, factor, scales, mode)
        moved, _ = descent_columns(rows, block, codes, flat, flat, number.max, number)
        # The order decides between equal errors.
        options = [codes[:, None], moved[:, None], elements]
        elements = backend.concatenate(options, axis=1)
        scales = backend.concatenate([flat[None], flat[None], scales])
        changes = elements * scales - before[:, None]
        best = group_errors(changes, block, rows).argmin(axis=0)
        elements, scale, change = take_candidate(best, elements, scales, changes)
        remaining = remaining[size:] - matrix[start + size :, columns] @ change
        groups.append((elements, scale))
        async_eval((remaining, *groups[-1]))
    return FloatGrid(*stack_groups(groups))
