"""Codes found column by column: by groups alone, by GPTQ, and by coordinate descent."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ..affine_grid import AffineGrid, fit_grid, nearest, safe_scale
from ..backend import compiled, library, to_fast_backend
from .hessian import Hessian

# Columns whose errors spread one by one; beyond them by one product.
STRIP = 8


def fit_groups(
    target: mx.array, costs: mx.array, group: int, levels: float, dtype: mx.Dtype
) -> AffineGrid:
    """For every group by itself the grid that loses least, and nearest codes.

    Args:
        costs: float32 [K], of a squared error in each column.
    """
    rows, costs = to_fast_backend(target.T), to_fast_backend(costs)
    found = []
    for start in range(0, len(rows), group):
        here = slice(start, start + group)
        scale, bias = fit_grid(rows[here], costs[here], levels, dtype)
        unit, top = safe_scale(scale, levels)
        codes = nearest((rows[here] - bias) / unit, top)
        found.append((codes, scale, bias))
        _begin(found[-1])
    return _grid(found)


def gptq(
    target: mx.array, hessian: Hessian, group: int, levels: float, dtype: mx.Dtype
) -> AffineGrid:
    """Column by column, each error made up for by the columns that follow.

    In the Hessian's order; the grid of a group is fitted when its turn comes, to
    weights that have taken up the errors so far.
    """
    factor, order = to_fast_backend(hessian.factor), hessian.order
    left = to_fast_backend(target[:, order].T)
    found = []
    for start in range(0, len(factor), group):
        here = slice(start, start + group)
        block = factor[here, here]
        costs = 1 / library(block).diagonal(block) ** 2
        scale, bias = fit_grid(left[:group], costs, levels, dtype)
        unit, top = safe_scale(scale, levels)
        take = partial(_gptq_strip, unit=unit, bias=bias, top=top)
        codes, errors = _blockwise_scan(take, left[:group], block)
        left = left[group:] - factor[here, start + group :].T @ errors
        found.append((codes, scale, bias))
        _begin((left, *found[-1]))
    grid, back = _grid(found), mx.argsort(order)
    groups = mx.argsort(order[::group])
    return AffineGrid(
        grid.codes[:, back], grid.scales[:, groups], grid.biases[:, groups]
    )


def coordinate_descent(
    grid: AffineGrid, target: mx.array, matrix: mx.array, levels: float
) -> AffineGrid:
    """One sweep over all codes: each goes where it loses least, the others fixed."""
    # Half the error's slope with its sign turned: where every weight wants to go.
    pull = to_fast_backend(matrix @ (target - grid.weight()).T)
    before, matrix = to_fast_backend(grid.codes.T), to_fast_backend(matrix)
    scales, biases = to_fast_backend(grid.scales.T), to_fast_backend(grid.biases.T)
    found = []
    for number, start in enumerate(range(0, len(before), grid.group)):
        here = slice(start, start + grid.group)
        unit, top = safe_scale(scales[number], levels)
        take = partial(_descent_strip, scale=scales[number], unit=unit, top=top)
        own, rest = pull[: grid.group], pull[grid.group :]
        codes, moved = _blockwise_scan(take, own, matrix[here, here], before[here])
        pull = rest - matrix[start + grid.group :, here] @ moved
        found.append((codes, scales[number], biases[number]))
        _begin((pull, codes))
    return _grid(found)


def _blockwise_scan(take: Callable, rows, matrix, *others):
    """Take rows by strips; what a strip spreads is taken off all rows after it.

    Args:
        take: gives codes and spread, [STRIP, N] both, of rows, their part of the matrix
            and their part of the others.
        rows: [g, N], a column of the weight each.
        matrix: [g, g]; row k says how much of row k's spread the others lose.
    """
    codes, spreads = [], []
    for start in range(0, len(matrix), STRIP):
        here, after = slice(start, start + STRIP), slice(start + STRIP, None)
        parts = (other[here] for other in others)
        code, spread = take(rows[:STRIP], matrix[here, here], *parts)
        rows = rows[STRIP:] - matrix[here, after].T @ spread
        codes.append(code)
        spreads.append(spread)
    joined = library(rows).concatenate
    return joined(codes), joined(spreads)


@compiled
def _gptq_strip(rows, factor, unit, bias, top):
    its = library(rows)
    diagonal = its.diagonal(factor)[:, None]
    # In units of the scale, a column takes half as many operations.
    steps, spread = (rows - bias) / unit, (factor / diagonal)[..., None]
    codes, errors = [], []
    for column in range(len(factor)):
        code = nearest(steps[0], top)
        error = steps[0] - code
        steps = steps[1:] - spread[column, column + 1 :] * error
        codes.append(code)
        errors.append(error)
    return its.stack(codes), its.stack(errors) * unit / diagonal


@compiled
def _descent_strip(pull, matrix, before, scale, unit, top):
    its = library(pull)
    diagonal = its.diagonal(matrix)
    steps, spread = pull / unit / diagonal[:, None], (matrix / diagonal)[..., None]
    codes = []
    for column in range(len(matrix)):
        code = nearest(before[column] + steps[0], top)
        steps = steps[1:] - spread[column, column + 1 :] * (code - before[column])
        codes.append(code)
    codes = its.stack(codes)
    return codes, (codes - before) * scale


def _begin(arrays: tuple) -> None:
    """Let MLX begin what is to be done; NumPy has done it."""
    mx.async_eval([array for array in arrays if library(array) is mx])


def _grid(groups: list[tuple]) -> AffineGrid:
    """Codes [g, N], scales [N] and biases [N] of every group as a grid."""
    codes, scales, biases = (list(map(mx.array, v)) for v in zip(*groups, strict=True))
    stacked = (mx.stack(v, axis=1) for v in (scales, biases))
    return AffineGrid(mx.concatenate(codes).T, *stacked)
