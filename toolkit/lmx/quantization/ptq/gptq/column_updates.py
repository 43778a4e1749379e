"""What the solvers of all grids share: updates of codes and the best grid of rows.

The codes of a group are updated column by column, by GPTQ and coordinate descent.
On a CPU, a strip of columns is updated one by one; their effect on later columns of the
group is one product. On a GPU, one kernel updates the group.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import mlx.core as mx

from ....interfaces import Communicator
from ....models.float_formats import FloatFormat
from ... import gpu_kernels
from ...affine_grid import Grid, nearest
from ...backend import compiled_for, library

# Columns that are updated one by one.
STRIP = 8


@cache
def _strip_for(number: FloatFormat | None, strip: Callable) -> Callable:
    """A strip function, the same one in every call, as each is compiled once."""
    return partial(strip, rounding=number.nearest if number else nearest)


@gpu_kernels.on_gpu_by("gptq_columns")
def gptq_columns(rows, factor, scale, bias, top, number=None):
    """Codes and errors of a group, whose later columns compensate for earlier ones.

    Args:
        rows: [g, N], a column of the weight each.
        factor: [g, g], the part of the Hessian's factor for these columns.
        scale, bias: [N]; no scale is 0.
        top: [N], highest codes.
        number: a `FloatFormat`, whose values are the codes. None = integers from 0.

    Returns:
        Codes [g, N], and errors [g, N] for the columns of later groups.
    """
    update = compiled_for(factor, _strip_for(number, gptq_strip))
    concatenate = library(factor).concatenate
    codes, errors = [], []
    for first in range(0, len(factor), STRIP):
        strip, later = slice(first, first + STRIP), slice(first + STRIP, None)
        strip_codes, error = update(
            rows[:STRIP], factor[strip, strip], scale, bias, top
        )
        rows = rows[STRIP:] - factor[strip, later].T @ error
        codes.append(strip_codes)
        errors.append(error)
    return concatenate(codes), concatenate(errors)


def gptq_strip(rows, factor, scale, bias, top, *, rounding):
    """`gptq_columns` for one strip."""
    backend = library(rows)
    diagonal = backend.diagonal(factor)[:, None]
    # In units of the scale, a column takes half as many operations.
    steps, spread = (rows - bias) / scale, (factor / diagonal)[..., None]
    codes, errors = [], []
    for column in range(len(factor)):
        code = rounding(steps[0], top)
        error = steps[0] - code
        steps = steps[1:] - spread[column, column + 1 :] * error
        codes.append(code)
        errors.append(error)
    return backend.stack(codes), backend.stack(errors) * scale / diagonal


@gpu_kernels.on_gpu_by("descent_columns")
def descent_columns(descent, matrix, old_codes, scale, divisor, top, number=None):
    """Codes of a group, each moved to its minimum with the others fixed.

    Args:
        descent: [g, N], minus half the gradient of the error.
        matrix: [g, g], the part of the Hessian for these columns.
        old_codes: [g, N].
        scale, divisor: [N]; the divisor is the scale, or 1 where that is 0.
        top: [N], highest codes.
        number: as in `gptq_columns`.

    Returns:
        Codes and changes of the weight, both [g, N].
    """
    update = compiled_for(matrix, _strip_for(number, descent_strip))
    concatenate = library(matrix).concatenate
    codes, changes = [], []
    for first in range(0, len(matrix), STRIP):
        strip, later = slice(first, first + STRIP), slice(first + STRIP, None)
        grid = old_codes[strip], scale, divisor, top
        strip_codes, change = update(descent[:STRIP], matrix[strip, strip], *grid)
        descent = descent[STRIP:] - matrix[strip, later].T @ change
        codes.append(strip_codes)
        changes.append(change)
    return concatenate(codes), concatenate(changes)


def descent_strip(descent, matrix, old_codes, scale, divisor, top, *, rounding):
    """`descent_columns` for one strip."""
    backend = library(descent)
    diagonal = backend.diagonal(matrix)
    steps = descent / divisor / diagonal[:, None]
    spread = (matrix / diagonal)[..., None]
    codes = []
    for column in range(len(matrix)):
        code = rounding(old_codes[column] + steps[0], top)
        steps = steps[1:] - spread[column, column + 1 :] * (code - old_codes[column])
        codes.append(code)
    codes = backend.stack(codes)
    return codes, (codes - old_codes) * scale


def group_errors(changes, matrix, descent):
    """Errors [candidates, N] of a group's output, less that of no change.

    Args:
        changes: of the weight, [g, candidates, N].
        matrix: [g, g], the part of the Hessian for these columns.
        descent: [g, N], minus half the gradient of the error.
    """
    products = (matrix @ changes.reshape(len(changes), -1)).reshape(changes.shape)
    return (changes * (products - 2 * descent[:, None])).sum(axis=0)


def take_candidate(number, *arrays):
    """Arrays [..., candidates, N] at the candidate `number` [N] of each row."""
    backend = library(number)
    places = [number.reshape((1,) * (array.ndim - 1) + (-1,)) for array in arrays]
    return tuple(
        backend.take_along_axis(array, place, axis=-2).squeeze(-2)
        for array, place in zip(arrays, places, strict=True)
    )


def stack_groups(groups: list[tuple]) -> tuple[mx.array, ...]:
    """Codes [g, N] and values [N] of every group as codes [N, K] and values [N, G]."""
    codes, *values = (list(map(mx.array, v)) for v in zip(*groups, strict=True))
    return mx.concatenate(codes).T, *(mx.stack(v, axis=1) for v in values)


class BestGridTracker:
    """Keeps the best grid of every row.

    Attributes:
        grid: the best rows so far.
        errors: float32 [N], squared output error of each row of `grid`.
        descent: float32 [N, K], minus half the gradient of these errors with respect
            to the weight.
        candidates: errors [N] of each candidate by name.
        output: float32 [N], squared norm of the outputs of the target.
    """

    def __init__(self, target: mx.array, matrix: mx.array, dtype: mx.Dtype):
        self.target = target
        self.matrix = matrix
        self.dtype = dtype
        self.candidates: dict[str, mx.array] = {}
        self.output = ((target @ matrix) * target).sum(axis=1)
        self.errors: mx.array | None = None

    def add_grid(self, name: str, grid: Grid) -> None:
        """Evaluate a grid as it is stored."""
        difference = self.target - grid.weight(self.dtype)
        descent = difference @ self.matrix
        errors = (descent * difference).sum(axis=1)
        # A row with NaN is worse than any other.
        errors = mx.where(mx.isnan(errors), mx.inf, errors)
        self.candidates[name] = errors
        if self.errors is None:
            self.grid, self.errors, self.descent = grid, errors, descent
        else:
            is_better = errors < self.errors
            self.grid = grid.over(self.grid, is_better[:, None])
            self.errors = mx.minimum(errors, self.errors)
            self.descent = mx.where(is_better[:, None], descent, self.descent)
        mx.eval(errors, self.errors, self.descent, vars(self.grid))

    def gather(self, ranks: Communicator, count: int) -> None:
        """Replace this process's share of some rows by all of them.

        Args:
            count: of all rows; see `Communicator.own_rows`.
        """
        values = self.grid.arrays
        arrays = [*values.values(), self.target, self.output, *self.candidates.values()]
        rows = iter(ranks.gather_rows(arrays, count))
        self.grid = replace(self.grid, **dict(zip(values, rows, strict=False)))
        self.target, self.output = next(rows), next(rows)
        self.candidates = dict(zip(self.candidates, rows, strict=True))
        self.errors = self.candidates["best"]
        del self.descent
