"""GPTQ on the block types of GGUF: codes, integer scales and minima, and steps.

A step of a block is float16, and a group's scale and minimum are small integers. So a
group takes the integers nearest to a fitted scale and minimum, or ones beside them: its
columns are quantized with each candidate, and the one with the least error of the
layer's output is kept, as in `float_solver`. Then least squares refits the steps of all
blocks with the full Hessian, and every group moves to less error with the others fixed.
"""

from dataclasses import replace

import mlx.core as mx

from ....config.quant_spec import QuantSpec
from ... import gpu_kernels
from ...affine_grid import fit_grid, safe_scale
from ...backend import async_eval, library, to_fast_backend
from ...gguf_grid import (
    FORMATS,
    BlockFormat,
    GGUFGrid,
    block_scales,
    nearest_integers,
    round_to_nearest,
    to_float16,
    with_nearest_codes,
)
from ..hessian import Hessian, group_factors
from .column_updates import (
    BestGridTracker,
    descent_columns,
    gptq_columns,
    group_errors,
    stack_groups,
    take_candidate,
)

# Candidates of a group: relative changes of the step of a small block, and changes of
# the integer scale and minimum of a group of a K block.
STEP_FACTORS = (1.0, 0.97, 1.03)
SCALE_OFFSETS = ((0, 0), (-1, 0), (1, 0))
MINIMUM_OFFSETS = (*SCALE_OFFSETS, (0, -1), (0, 1))
# Factors by which the range of a group without a minimum is shrunk in the search.
SHRINK_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.79, 0.72, 0.64, 0.55)
LEAST_SQUARES_ITERS = 3
# Elements of the largest array of a refit.
MAX_REFIT_ELEMENTS = 1 << 24
RIDGE = 1e-6


def solve_gguf_rows(
    weight: mx.array,
    target: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    refine_iters: int,
) -> BestGridTracker:
    """The best blocks of every row for a target, float32 [N, K].

    Args:
        weight: [N, K], which RTN rounds.
        dtype: of the checkpoint; blocks have their own types.
        refine_iters: rounds of a refit of the steps and of `group_descent`.
    """
    form, matrix = FORMATS[spec.mode], hessian.matrix
    best = BestGridTracker(target, matrix, mx.float32)
    best.add_grid("RTN", round_to_nearest(weight.astype(mx.float32), form))
    start = fit_blocks(target, mx.diagonal(matrix), form)
    best.add_grid("fitted", start)
    best.add_grid("GPTQ", gguf_gptq(target, hessian, start, form))
    for iteration in range(refine_iters):
        best.add_grid(
            f"refit {iteration + 1}", refit_steps(best.grid, best.descent, matrix)
        )
        grid = group_descent(best.grid, best.descent, matrix, form)
        best.add_grid(f"refined {iteration + 1}", grid)
    best.candidates["best"] = best.errors
    return best


def fit_blocks(target: mx.array, costs: mx.array, form: BlockFormat) -> GGUFGrid:
    """Fit the scale of every group on its own, round it, and take the nearest codes.

    Args:
        costs: float32 [K], of a squared error in each column.
    """
    rows, costs = to_fast_backend(target.T), to_fast_backend(costs)
    fitted = []
    for start in range(0, len(rows), form.group):
        columns = slice(start, start + form.group)
        fitted.append(_fit_group(rows[columns], costs[columns], form))
        async_eval(fitted[-1])
    scales, biases = (
        mx.stack(list(map(mx.array, values)), axis=1)
        for values in zip(*fitted, strict=True)
    )
    return with_nearest_codes(target, block_scales(scales, biases, form), form)


def gguf_gptq(
    target: mx.array, hessian: Hessian, start: GGUFGrid, form: BlockFormat
) -> GGUFGrid:
    """Quantize group by group. Later columns compensate for the error of each.

    Columns go in the order of the Hessian, as in `solver.gptq`. The steps of K
    blocks are those of `start`, as the groups of a block are not neighbors there.
    """
    factor, order = to_fast_backend(hessian.factor), hessian.order
    remaining = to_fast_backend(target[:, order].T)
    steps = [to_fast_backend(v.T) for v in start.steps_by_group]
    groups = []
    numbers = (order[:: form.group] // form.group).tolist()
    for start_column, number in zip(
        range(0, len(factor), form.group), numbers, strict=True
    ):
        columns = slice(start_column, start_column + form.group)
        block, rows = factor[columns, columns], remaining[: form.group]
        costs = 1 / library(block).diagonal(block) ** 2
        scale, bias = _fit_group(rows, costs, form)
        options = _options(scale, bias, steps[0][number], steps[1][number], form)
        codes, errors, options = _gptq_candidates(rows, block, options, form)
        chosen = (errors * errors).sum(axis=0).argmin(axis=0)
        codes, errors, *values = take_candidate(chosen, codes, errors, *options)
        remaining = remaining[form.group :] - factor[columns, columns.stop :].T @ errors
        groups.append((codes, *values))
        async_eval((remaining, *groups[-1]))
    return _grid_of(groups, start, form, hessian.order)


def group_descent(
    grid: GGUFGrid, descent: mx.array, matrix: mx.array, form: BlockFormat
) -> GGUFGrid:
    """One sweep over all groups: each moves to less error with the others fixed.

    A group is quantized anew by GPTQ with the scales and minima next to its own and
    with fitted ones, and by coordinate descent from its codes. It stays as it is if
    nothing is better.

    Args:
        descent: float32 [N, K], (target - weight) times the matrix.
    """
    factors = group_factors(matrix, form.group)
    remaining, matrix = to_fast_backend(descent.T), to_fast_backend(matrix)
    old_codes = to_fast_backend(grid.codes.T)
    arrays = (*grid.steps_by_group, grid.scales, grid.minima)
    old = [to_fast_backend(v.T) for v in arrays]
    backend = library(remaining)
    groups = []
    for number, start in enumerate(range(0, len(old_codes), form.group)):
        columns = slice(start, start + form.group)
        rows, block = remaining[: form.group], matrix[columns, columns]
        factor, codes_before = to_fast_backend(factors[number]), old_codes[columns]
        # Steps, minimum steps, scales and minima, each [1, N].
        present = tuple(v[number][None] for v in old)
        scale, bias = (v[0] for v in _affine(present, form))
        divisor, top = safe_scale(scale, form.levels)
        before = codes_before * scale + bias
        optimum = before + factor.T @ (factor @ rows)
        costs = 1 / backend.diagonal(factor) ** 2
        step, min_step, integer, minimum = (v[0] for v in present)
        fitted = _options(*_fit_group(optimum, costs, form), step, min_step, form)
        if form.is_small:
            beside = _options(step, 0 * step, step, min_step, form)
        else:
            beside = _neighbors(step, min_step, integer, minimum, form)
        options = _joined(backend, beside, fitted)
        codes, _, options = _gptq_candidates(optimum, factor, options, form)
        moved, _ = descent_columns(rows, block, codes_before, scale, divisor, top)
        # The order decides between equal errors.
        codes = [codes_before[:, None], moved[:, None], codes]
        codes = backend.concatenate(codes, axis=1)
        options = _joined(backend, present, present, options)
        scales, biases = _affine(options, form)
        changes = codes * scales + biases - before[:, None]
        best = group_errors(changes, block, rows).argmin(axis=0)
        codes, change, *values = take_candidate(best, codes, changes, *options)
        remaining = remaining[form.group :] - matrix[columns.stop :, columns] @ change
        groups.append((codes, *values))
        async_eval((remaining, *groups[-1]))
    return _grid_of(groups, grid, form)


def refit_steps(grid: GGUFGrid, descent: mx.array, matrix: mx.array) -> GGUFGrid:
    """Fit the steps of all blocks at once to codes, scales and minima, by least
    squares.

    Args:
        descent: float32 [N, K], (target - weight) times the matrix.
    """
    width, blocks = len(matrix), grid.steps.shape[1]
    size = max(1, MAX_REFIT_ELEMENTS // (2 * blocks * width))
    fitted = []
    for start in range(0, len(descent), size):
        rows = slice(start, start + size)
        fitted.append(_refit_rows(grid[rows], descent[rows], matrix))
        mx.eval(fitted[-1])
    steps, min_steps = (mx.concatenate(v) for v in zip(*fitted, strict=True))
    return replace(grid, steps=steps, min_steps=min_steps)


def _refit_rows(grid: GGUFGrid, descent: mx.array, matrix: mx.array):
    count, width = descent.shape
    blocks = grid.steps.shape[1]
    shape = (count, blocks, width // blocks)
    by_scale = (grid.codes - grid.middle).reshape(*grid.scales.shape, grid.group)
    bases = [(by_scale * grid.scales[..., None]).reshape(shape)]
    has_minimum = not grid.middle
    if has_minimum:
        bases.append(-mx.repeat(grid.minima, grid.group, axis=1).reshape(shape))
    by_block = matrix.reshape(blocks, -1, width)
    moments = [
        (base.swapaxes(0, 1) @ by_block).reshape(blocks, *shape) for base in bases
    ]
    system = mx.concatenate(
        [
            mx.concatenate([(m * b).sum(axis=-1).transpose(1, 0, 2) for b in bases], 2)
            for m in moments
        ],
        axis=1,
    )
    sums = mx.concatenate([(descent.reshape(shape) * b).sum(-1) for b in bases], 1)
    diagonal = mx.diagonal(system, axis1=1, axis2=2)
    # A block of zeros has no gradient; any ridge keeps its step.
    ridge = RIDGE * (diagonal + diagonal.mean(axis=1, keepdims=True)) + 1e-20
    system = system + ridge[..., None] * mx.eye(system.shape[1])
    with mx.stream(mx.cpu):
        change = mx.linalg.solve(system, sums[..., None])[..., 0]
    steps = _same_sign(grid.steps, grid.steps + change[:, :blocks])
    if not has_minimum:
        return steps, grid.min_steps
    return steps, _same_sign(grid.min_steps, grid.min_steps + change[:, blocks:])


def _same_sign(old: mx.array, new: mx.array) -> mx.array:
    """New steps in float16; the old ones where the sign would change."""
    return to_float16(mx.where(new * old > 0, new, old))


def _fit_group(rows, costs, form: BlockFormat):
    """The scale and the bias [N] of rows [g, N], a column of the weight each."""
    if not form.has_minimum:
        scale = fit_scale(rows, costs, form)
        return scale, 0 * scale
    scale, bias = fit_grid(rows, costs, form.levels, mx.float32)
    # A minimum cannot be above zero.
    where, is_above = library(rows).where, bias > 0
    scale = where(is_above, rows.max(axis=0) / (form.levels - 1), scale)
    return scale, where(is_above, 0.0, bias)


@gpu_kernels.on_gpu_by(
    "fit_scale", shrink_factors=SHRINK_FACTORS, iterations=LEAST_SQUARES_ITERS
)
def fit_scale(rows, costs, form: BlockFormat):
    """The scale [N], of either sign, of levels around zero for rows [g, N]."""
    backend, middle = library(rows), form.middle
    low, high = rows.min(axis=0), rows.max(axis=0)
    full = backend.where(backend.abs(low) > backend.abs(high), low, high) / -middle
    best = None
    for shrink in SHRINK_FACTORS:
        for sign in (1.0, -1.0):
            best = _better_scale(rows, costs, form, best, sign * shrink * full)
    for _ in range(LEAST_SQUARES_ITERS):
        codes = _centered_codes(rows, best[1], form)
        squares = costs @ (codes * codes)
        fitted = (costs @ (codes * rows)) / backend.where(squares == 0, 1.0, squares)
        best = _better_scale(rows, costs, form, best, fitted)
    return best[1]


def _better_scale(rows, costs, form: BlockFormat, best, scale):
    misses = rows - scale * _centered_codes(rows, scale, form)
    error = costs @ (misses * misses)
    if best is None:
        return error, scale
    backend = library(rows)
    return backend.minimum(error, best[0]), backend.where(
        error < best[0], scale, best[1]
    )


def _centered_codes(rows, scale, form: BlockFormat):
    backend = library(rows)
    round_ = mx.round if backend is mx else backend.rint
    codes = round_(rows / backend.where(scale == 0, 1.0, scale))
    return backend.minimum(backend.maximum(codes, -form.middle), form.middle - 1)


def _options(scale, bias, step, min_step, form: BlockFormat):
    """Candidates of a group near a scale and a bias [N].

    Returns:
        Steps, minimum steps, scales and minima, each [candidates, N].
    """
    backend = library(scale)
    if form.is_small:
        steps = to_float16(backend.stack([f * scale for f in STEP_FACTORS]))
        return steps, 0 * steps, 0 * steps + 1, 0 * steps
    integers = [nearest_integers(scale, step, form)]
    integers.append(nearest_integers(-bias, min_step, form))
    return _neighbors(step, min_step, *integers, form)


def _neighbors(step, min_step, scale, minimum, form: BlockFormat):
    """Candidates of a group of a K block beside integers [N]; see `_options`."""
    backend, (low, high) = library(scale), form.scales
    offsets = MINIMUM_OFFSETS if form.has_minimum else SCALE_OFFSETS
    scales = backend.stack([scale + offset for offset, _ in offsets])
    minima = backend.stack([minimum + offset for _, offset in offsets])
    scales = backend.minimum(backend.maximum(scales, low), high)
    minima = backend.minimum(backend.maximum(minima, 0), max(high, 0))
    ones = 0 * scales + 1
    return step * ones, min_step * ones, scales, minima


def _gptq_candidates(rows, factor, options: tuple, form: BlockFormat):
    """Codes and errors [g, candidates, N], and the candidates.

    All candidates are quantized side by side, as rows of one weight.
    """
    backend, (count, size) = library(rows), options[0].shape
    scale, bias = (v.reshape(-1) for v in _affine(options, form))
    divisor, top = safe_scale(scale, form.levels)
    codes, errors = gptq_columns(
        backend.concatenate([rows] * count, axis=1), factor, divisor, bias, top
    )
    shape = (len(rows), count, size)
    return codes.reshape(shape), errors.reshape(shape), options


def _affine(options: tuple, form: BlockFormat):
    """Scales and biases of candidates."""
    step, min_step, scale, minimum = options
    scale = step * scale
    return scale, -min_step * minimum - form.middle * scale


def _joined(backend, *options: tuple) -> tuple:
    return tuple(backend.concatenate(parts) for parts in zip(*options, strict=True))


def _grid_of(
    groups: list[tuple],
    grid: GGUFGrid,
    form: BlockFormat,
    order: mx.array | None = None,
) -> GGUFGrid:
    """Codes [g, N] and values [N] of every group as a grid; its steps if they are K
    blocks.

    Args:
        order: of the columns, if it is not their own.
    """
    codes, steps, _, scales, minima = stack_groups(groups)
    if order is not None:
        codes = codes[:, mx.argsort(order)]
        by_group = mx.argsort(order[:: form.group])
        steps, scales, minima = (v[:, by_group] for v in (steps, scales, minima))
    steps = steps if form.is_small else grid.steps
    return replace(grid, codes=codes, steps=steps, scales=scales, minima=minima)
