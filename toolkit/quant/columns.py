"""Codes found column by column: by groups alone, by GPTQ, and by coordinate descent."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from .grid import Grid, fit_grid, inverted, nearest
from .hessian import Hessian

# Columns whose errors spread one by one; beyond them by one product.
STRIP = 8


def fitted(
    target, costs: mx.array, group: int, levels: mx.array, dtype: mx.Dtype
) -> Grid:
    """For every group by itself the grid that loses least, and nearest codes.

    Args:
        costs: float32 [K], of a squared error in each column.
    """
    rows = mx.contiguous(target.T)
    found = []
    for start in range(0, len(rows), group):
        here = slice(start, start + group)
        scale, bias = fit_grid(rows[here], costs[here], levels, dtype)
        codes = nearest(rows[here], inverted(scale), bias, levels)
        found.append((codes, scale, bias))
        mx.async_eval(found[-1])
    codes, scales, biases = zip(*found, strict=True)
    stacked = (mx.stack(v, axis=1) for v in (scales, biases))
    return Grid(mx.concatenate(codes).T, *stacked)


def gptq(
    target, hessian: Hessian, group: int, levels: mx.array, dtype: mx.Dtype
) -> Grid:
    """Column by column, each error made up for by the columns that follow.

    In the Hessian's order; the grid of a group is fitted when its turn comes, to
    weights that have taken up the errors so far.
    """
    factor, order = hessian.factor, hessian.order
    left = mx.contiguous(target[:, order].T)
    found = []
    for start in range(0, len(factor), group):
        here = slice(start, start + group)
        block = factor[here, here]
        costs = 1 / mx.diagonal(block) ** 2
        scale, bias = fit_grid(left[:group], costs, levels, dtype)
        points = {"scale": scale, "inverse": inverted(scale), "bias": bias}
        take = partial(_gptq_strip, **points, levels=levels)
        codes, errors = _in_turn(take, left[:group], block)
        left = left[group:] - factor[here, start + group :].T @ errors
        found.append((codes, scale, bias))
        mx.async_eval(left, found[-1])
    codes, scales, biases = zip(*found, strict=True)
    groups = mx.argsort(order[::group])
    stacked = (mx.stack(v, axis=1)[:, groups] for v in (scales, biases))
    return Grid(mx.concatenate(codes).T[:, mx.argsort(order)], *stacked)


def descend(grid: Grid, target: mx.array, matrix: mx.array, levels: mx.array) -> Grid:
    """One sweep over all codes: each goes where it loses least, the others fixed."""
    # Rows that lie side by side: a strip of others takes twice as long on a CPU.
    weight, scales, biases = (
        mx.contiguous(v.T) for v in (grid.weight(), grid.scales, grid.biases)
    )
    # Half the error's slope with its sign turned: where every weight wants to go.
    pull = matrix @ (target.T - weight)
    found = []
    for number, start in enumerate(range(0, len(weight), grid.group)):
        here = slice(start, start + grid.group)
        take = partial(
            _descent_strip,
            scale=scales[number],
            inverse=inverted(scales[number]),
            bias=biases[number],
            levels=levels,
        )
        own, rest = pull[: grid.group], pull[grid.group :]
        codes, moved = _in_turn(take, own, matrix[here, here], weight[here])
        pull = rest - matrix[start + grid.group :, here] @ moved
        found.append(codes)
        mx.async_eval(pull, codes)
    return Grid(mx.concatenate(found).T, grid.scales, grid.biases)


def _in_turn(take: Callable, rows: mx.array, matrix: mx.array, *others: mx.array):
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
    return mx.concatenate(codes), mx.concatenate(spreads)


@mx.compile
def _gptq_strip(rows, factor, scale, inverse, bias, levels):
    codes, errors = [], []
    for column in range(len(rows)):
        code = nearest(rows[column], inverse, bias, levels)
        error = (rows[column] - (code * scale + bias)) / factor[column, column]
        rows = rows - factor[column][:, None] * error
        codes.append(code)
        errors.append(error)
    return mx.stack(codes), mx.stack(errors)


@mx.compile
def _descent_strip(pull, matrix, weight, scale, inverse, bias, levels):
    codes, moves = [], []
    for column in range(len(pull)):
        wanted = weight[column] + pull[column] / matrix[column, column]
        code = nearest(wanted, inverse, bias, levels)
        move = code * scale + bias - weight[column]
        pull = pull - matrix[column][:, None] * move
        codes.append(code)
        moves.append(move)
    return mx.stack(codes), mx.stack(moves)
