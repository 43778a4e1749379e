"""Codes, scales and biases of one layer that lose least on its inputs.

GPTQ (arXiv 2210.17323) with grids fitted on the way and the costliest columns first,
towards a target that makes up for earlier layers' errors (arXiv 2504.02692,
2505.11695); then, in turns, all scales and biases by least squares with the full
Hessian, and codes by coordinate descent (arXiv 2309.01885). Rows are independent of
each other, so each keeps the best it has met, plain rounding among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import mlx.core as mx

from .codes import pack_codes, unpack_codes
from .grid import fit_grid, nearest
from .hessian import Hessian
from .spec import QuantSpec, pack

# Columns whose errors spread one by one; beyond them by one product.
STRIP = 8
# Numbers of a weight solved at once, and of a refit's largest array.
WEIGHTS_AT_ONCE, REFIT_AT_ONCE = 1 << 24, 1 << 26
RIDGE = 1e-4


@dataclass(frozen=True)
class Settings:
    """Which steps are taken.

    Attributes:
        rounds: of refit and coordinate descent after GPTQ.
        asymmetry: how far the target makes up for the errors of earlier layers, 0 to 1.
    """

    rounds: int = 3
    asymmetry: float = 0.5


@dataclass(frozen=True)
class Solution:
    """A layer as it is stored, and what it loses.

    Attributes:
        tensors: weight (packed codes), scales and biases.
        errors: what every way loses by itself, as a share of the output; `kept` last.
    """

    tensors: dict[str, mx.array]
    errors: dict[str, float]


@dataclass(frozen=True)
class Grid:
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

    def over(self, other: "Grid", rows: mx.array) -> "Grid":
        """This in the rows that are True, the other elsewhere."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Grid(*(mx.where(rows[:, None], a, b) for a, b in pairs))


def solve(
    weight: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    cross: mx.array | None = None,
    settings: Settings = Settings(),
) -> Solution:
    """Quantize one weight.

    Args:
        weight: [N, K].
        hessian: of the layer's inputs as the quantized model has them.
        dtype: the type scales and biases are stored in.
        cross: float32 [K, K], X'(Y - X) of those inputs X and the full-precision
            model's Y, on the scale of the Hessian's moments.
    """
    rows = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
    parts: list[Grid] = []
    lost: dict[str, float] = {}
    output = 0.0
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        grid, errors, whole = _solved(part, hessian, spec, dtype, cross, settings)
        parts.append(grid)
        output += whole
        lost = {way: lost.get(way, 0.0) + error for way, error in errors.items()}
    codes, scales, biases = (
        mx.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Grid)
    )
    tensors = {
        "weight": pack_codes(codes, spec.bits),
        "scales": scales.astype(dtype),
        "biases": biases.astype(dtype),
    }
    mx.eval(tensors)
    return Solution(tensors, {way: e / (output or 1.0) for way, e in lost.items()})


def _solved(weight, hessian: Hessian, spec: QuantSpec, dtype, cross, settings):
    """The best grid of some rows, what every way loses, and the rows' whole output."""
    levels = mx.array(2.0**spec.bits)
    plain = rounded(weight, spec, dtype)
    weight = weight.astype(mx.float32)
    target = weight
    if cross is not None and settings.asymmetry:
        missing = hessian.solve(weight @ cross.T)
        target = weight + settings.asymmetry * missing
    judge = Judge(target, hessian.matrix, dtype)
    judge("round to nearest", plain)
    judge("grid", fitted(target, hessian, spec.group_size, levels, dtype))
    grid = gptq(target, hessian, spec.group_size, levels, dtype)
    judge("gptq", grid)
    for number in range(settings.rounds):
        grid = refit(grid, target, hessian.matrix, dtype)
        grid = descend(grid, target, hessian.matrix, levels)
        judge(f"descent {number + 1}", grid)
        grid = judge.best
    judge("kept", judge.best)
    return judge.best, judge.lost, judge.output


class Judge:
    """Keeps the best grid of every row.

    Attributes:
        best: of those met so far.
        lost: by every way, its squared error on the layer's inputs.
        output: the same for no weights at all.
    """

    def __init__(self, target: mx.array, matrix: mx.array, dtype: mx.Dtype):
        self.target = target
        self.matrix = matrix
        self.dtype = dtype
        self.lost: dict[str, float] = {}
        self.output = ((target @ matrix) * target).sum().item()
        self._errors: mx.array | None = None

    def __call__(self, way: str, grid: Grid) -> None:
        """Judge a grid as it is stored."""
        off = grid.weight(self.dtype) - self.target
        errors = ((off @ self.matrix) * off).sum(axis=1)
        self.lost[way] = errors.sum().item()
        if self._errors is None:
            self.best, self._errors = grid, errors
        else:
            self.best = grid.over(self.best, errors < self._errors)
            self._errors = mx.minimum(errors, self._errors)
        mx.eval(self._errors, vars(self.best))


def rounded(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> Grid:
    """MLX's own grids and nearest codes."""
    packed = pack(weight, spec, dtype)
    scales, biases = (packed[k].astype(mx.float32) for k in ("scales", "biases"))
    codes = unpack_codes(packed["weight"], spec.bits).astype(mx.float32)
    return Grid(codes, scales, biases)


def fitted(
    target, hessian: Hessian, group: int, levels: mx.array, dtype: mx.Dtype
) -> Grid:
    """For every group by itself the grid that loses least, and nearest codes."""
    costs = mx.diagonal(hessian.matrix)
    found = []
    for start in range(0, target.shape[1], group):
        here = slice(start, start + group)
        scale, bias = fit_grid(target[:, here], costs[here], levels, dtype)
        codes = nearest(target[:, here], scale[:, None], bias[:, None], levels)
        found.append((codes, scale, bias))
        mx.async_eval(found[-1])
    codes, scales, biases = zip(*found, strict=True)
    stacked = (mx.stack(v, axis=1) for v in (scales, biases))
    return Grid(mx.concatenate(codes, axis=1), *stacked)


def gptq(
    target, hessian: Hessian, group: int, levels: mx.array, dtype: mx.Dtype
) -> Grid:
    """Column by column, each error made up for by the columns that follow.

    In the Hessian's order; the grid of a group is fitted when its turn comes, to
    weights that have taken up the errors so far.
    """
    factor, order = hessian.factor, hessian.order
    left = target[:, order].T
    found = []
    for start in range(0, len(factor), group):
        here = slice(start, start + group)
        block = factor[here, here]
        costs = 1 / mx.diagonal(block) ** 2
        scale, bias = fit_grid(left[:group].T, costs, levels, dtype)
        take = partial(_gptq_strip, scale=scale, bias=bias, levels=levels)
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
    weight = grid.weight().T
    # Half the error's slope with its sign turned: where every weight wants to go.
    pull = matrix @ (target.T - weight)
    found = []
    for number, start in enumerate(range(0, len(weight), grid.group)):
        here = slice(start, start + grid.group)
        take = partial(
            _descent_strip,
            scale=grid.scales[:, number],
            bias=grid.biases[:, number],
            levels=levels,
        )
        codes, moved = _in_turn(take, pull[here], matrix[here, here], weight[here])
        pull = pull - matrix[:, here] @ moved
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
def _gptq_strip(rows, factor, scale, bias, levels):
    codes, errors = [], []
    for column in range(len(rows)):
        code = nearest(rows[column], scale, bias, levels)
        error = (rows[column] - (code * scale + bias)) / factor[column, column]
        rows = rows - factor[column][:, None] * error
        codes.append(code)
        errors.append(error)
    return mx.stack(codes), mx.stack(errors)


@mx.compile
def _descent_strip(pull, matrix, weight, scale, bias, levels):
    codes, moves = [], []
    for column in range(len(pull)):
        wanted = weight[column] + pull[column] / matrix[column, column]
        code = nearest(wanted, scale, bias, levels)
        move = code * scale + bias - weight[column]
        pull = pull - matrix[column][:, None] * move
        codes.append(code)
        moves.append(move)
    return mx.stack(codes), mx.stack(moves)


def refit(grid: Grid, target: mx.array, matrix: mx.array, dtype: mx.Dtype) -> Grid:
    """The scales and biases that lose least with these codes, all at once."""
    groups = grid.scales.shape[1]
    blocks = matrix.reshape(groups, grid.group, groups, grid.group)
    rows = max(1, REFIT_AT_ONCE // (groups * len(matrix)))
    found = []
    for start in range(0, len(target), rows):
        here = slice(start, start + rows)
        part = Grid(grid.codes[here], grid.scales[here], grid.biases[here])
        found.append(_refitted(part, target[here], blocks, dtype))
        mx.eval(found[-1])
    scales, biases = (mx.concatenate(v) for v in zip(*found, strict=True))
    return Grid(grid.codes, scales, biases)


def _refitted(grid: Grid, target: mx.array, blocks: mx.array, dtype: mx.Dtype):
    groups, group = blocks.shape[:2]
    width = groups * group
    codes = grid.codes.reshape(-1, groups, group)
    # About their mean, or scales and biases would mean nearly the same.
    middle = codes.mean(axis=-1)
    codes = codes - middle[..., None]
    moments = codes.swapaxes(0, 1) @ blocks.reshape(groups, group, width)
    moments = moments.reshape(groups, -1, groups, group)
    by_scales = (moments * codes).sum(axis=-1).transpose(1, 2, 0)
    mixed = moments.sum(axis=-1).transpose(1, 0, 2)
    by_biases = mx.broadcast_to(blocks.sum(axis=(1, 3)), by_scales.shape)
    system = mx.concatenate(
        [
            mx.concatenate([by_scales, mixed], axis=2),
            mx.concatenate([mixed.swapaxes(1, 2), by_biases], axis=2),
        ],
        axis=1,
    )
    pull = (target - grid.weight()) @ blocks.reshape(width, width)
    pull = pull.reshape(-1, groups, group)
    wanted = mx.concatenate([(pull * codes).sum(axis=-1), pull.sum(axis=-1)], axis=1)
    diagonal = mx.diagonal(system, axis1=1, axis2=2)
    ridge = RIDGE * diagonal + 1e-6 * diagonal.mean(axis=1, keepdims=True)
    system = system + ridge[..., None] * mx.eye(2 * groups)
    with mx.stream(mx.cpu):
        step = mx.linalg.solve(system, wanted[..., None])[..., 0]
    center = grid.biases + middle * grid.scales + step[:, groups:]
    scales = (grid.scales + step[:, :groups]).astype(dtype).astype(mx.float32)
    # The bias makes up for the rounding of the scale.
    biases = (center - middle * scales).astype(dtype).astype(mx.float32)
    return scales, biases
