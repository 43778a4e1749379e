"""Rows of a layer that make up for each other's errors.

Where an error goes counts, too. With H the second moments of a layer's inputs and A the
Fisher information of its outputs, errors E cost tr(A E H E'), the divergence from the
model to second order if inputs and slopes are independent (YAQA, arXiv 2505.22988,
sections 3 and 4). Rows are solved in sets, one after the other, and what a set loses
shifts the targets of those that are still free, as a column does with those that follow
it in GPTQ. With the linear layers of data/tiny-base alone in 4 bits, KL was 24% less.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ..affine_grid import AffineGrid
from ..packing import pack, pack_codes, unpack_codes
from .error_propagation import OutputError
from .gptq_columns import coordinate_descent, fit_groups, gptq
from .hessian import Hessian, inverse_factor

# Rows of one head answer most alike, and those of a set do not see each other:
# neighbours are in different ones. In four layers of data/tiny-base tr(A E H E') was 3
# to 18% less in 16 sets than in 8, and 1 to 12% less in 32; solving every set anew for
# what the others had lost, twice, was worth 1 to 9%. Fewer rows take as long as these.
SETS, LEAST_ROWS = 16, 32
# The share of the information that counts as alike for all outputs, none together.
SHRINKAGE = 0.2


@dataclass(frozen=True)
class OutputHessian:
    """How the loss answers to outputs together; rows are in the order of their sets.

    Attributes:
        order: int [N], the rows.
        sets: where in that order each set is.
        factor: float32 [N, N], upper triangular U with U'U the inverse of A.
    """

    order: mx.array
    sets: list[slice]
    factor: mx.array

    def passed_on(self, number: int, errors: mx.array) -> list[mx.array]:
        """What a set's errors [n, K], from the target it had, add to later targets."""
        here, later = self.sets[number], self.sets[number + 1 :]
        with mx.stream(mx.cpu):
            own = mx.linalg.tri_inv(self.factor[here, here], upper=True)
        spread = own.T @ errors
        return [self.factor[here, there].T @ spread for there in later]


def output_hessian(answers: mx.array, sets: int) -> OutputHessian | None:
    """How outputs count together; None = they do not count at all.

    Args:
        answers: float32 [N, N], their Fisher information.
        sets: into how many they go, if there are as many rows.
    """
    size = len(answers)
    mean = mx.diagonal(answers).mean().item()
    if not mean > 0:
        return None
    sets = min(sets, size)
    dealt = [mx.arange(first, size, sets) for first in range(sets)]
    order, ends = mx.concatenate(dealt), accumulate(map(len, dealt), initial=0)
    matrix = (1 - SHRINKAGE) / mean * answers[order][:, order]
    matrix = matrix + SHRINKAGE * mx.eye(size)
    factor = inverse_factor(matrix, mx.arange(size))
    return OutputHessian(order, [slice(*pair) for pair in pairwise(ends)], factor)


# --- from quant.refit: All scales and biases of given codes at once, by least squares.


# Numbers of the largest array.
MAX_REFIT_ELEMENTS = 1 << 24
RIDGE = 1e-4


def refit(
    grid: AffineGrid, target: mx.array, matrix: mx.array, dtype: mx.Dtype
) -> AffineGrid:
    """The scales and biases that lose least with these codes, all at once."""
    groups = grid.scales.shape[1]
    blocks = matrix.reshape(groups, grid.group, groups, grid.group)
    rows = max(1, MAX_REFIT_ELEMENTS // (groups * len(matrix)))
    found = []
    for start in range(0, len(target), rows):
        here = slice(start, start + rows)
        part = AffineGrid(grid.codes[here], grid.scales[here], grid.biases[here])
        found.append(_refitted(part, target[here], blocks, dtype))
        mx.eval(found[-1])
    scales, biases = (mx.concatenate(v) for v in zip(*found, strict=True))
    return AffineGrid(grid.codes, scales, biases)


def _refitted(grid: AffineGrid, target: mx.array, blocks: mx.array, dtype: mx.Dtype):
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


# --- from quant.closed_form: Codes, scales and biases of one layer that lose least on its inputs.
#
# GPTQ (arXiv 2210.17323) with grids fitted on the way and the costliest columns first,
# towards a target that makes up for earlier layers' errors (`making_up`); then, in turns,
# all scales and biases by least squares with the full Hessian, and codes by coordinate
# descent (arXiv 2309.01885). Every row keeps the best it has met, plain rounding among
# them. Where it is known how the loss answers to the outputs, rows then make up for each
# other's errors (`coupled`).


# Numbers of a weight solved at once; about ten float32 arrays of them are in memory.
AT_ONCE = 1 << 21


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer as it is stored, and what it loses.

    Attributes:
        tensors: weight (packed codes), scales and biases.
        errors: what every way loses by itself, as a share of the output; `kept` last.
    """

    tensors: dict[str, mx.array]
    errors: dict[str, float]


def solve_layer(
    weight: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    missing: OutputError | None = None,
    answers: mx.array | None = None,
    rounds: int = 3,
) -> QuantizedLayer:
    """Quantize one weight.

    Args:
        weight: [N, K].
        hessian: of the layer's inputs as the quantized model has them.
        dtype: the type scales and biases are stored in.
        missing: what the outputs miss on these inputs; None = nothing.
        answers: float32 [N, N], the Fisher information of the layer's outputs; None =
            rows are independent of each other.
        rounds: of refit and coordinate descent after GPTQ.
    """
    layer = _LayerSolver(hessian, spec, dtype, missing, rounds)
    sets = min(SETS, ceil(len(weight) / LEAST_ROWS))
    sets = max(sets, ceil(weight.size / AT_ONCE))
    rows = None if answers is None else output_hessian(answers, sets)
    if rows is None:
        at_once = max(1, AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), at_once):
            here = slice(start, start + at_once)
            layer.solve(weight[here], layer.target(weight[here], here))
        return layer.solution()
    _solve_coupled(layer, weight[rows.order], rows)
    return layer.solution(mx.argsort(rows.order))


def _solve_coupled(
    layer: "_LayerSolver", weight: mx.array, rows: OutputHessian
) -> None:
    """Set by set; to every one the later ones are free to make up for its errors."""
    shifts = [mx.array(0.0)] * len(rows.sets)
    for number, here in enumerate(rows.sets):
        target = layer.target(weight[here], rows.order[here]) + shifts[number]
        errors = layer.solve(weight[here], target).weight(layer.dtype) - target
        for later, more in enumerate(rows.passed_on(number, errors), number + 1):
            shifts[later] = shifts[later] + more
        mx.eval(shifts)


class _LayerSolver:
    """A layer that is solved part by part.

    Attributes:
        parts: what is stored of every part.
        lost: by way what all parts lose, their squared error on the layer's inputs.
    """

    def __init__(self, hessian: Hessian, spec: QuantSpec, dtype, missing, rounds):
        self.hessian = hessian
        self.spec = spec
        self.dtype = dtype
        self.missing = missing
        self.rounds = rounds
        self.parts: list[dict[str, mx.array]] = []
        self.lost: dict[str, float] = {}
        self._levels = 2.0**spec.bits
        self._output = 0.0

    def target(self, weight: mx.array, rows: slice | mx.array) -> mx.array:
        """What rows [n, K] are to stand for, and which they are."""
        weight = weight.astype(mx.float32)
        if self.missing is None or not self.missing.share:
            return weight
        made_up = self.hessian.solve(self.missing.of(weight, rows))
        return weight + self.missing.share * made_up

    def solve(self, weight: mx.array, target: mx.array) -> AffineGrid:
        """The next part, in every way; every row keeps its best."""
        hessian, group, dtype = self.hessian, self.spec.group_size, self.dtype
        judge = BestGridTracker(target, hessian.matrix, dtype)
        judge("round to nearest", rounded_layer(weight, self.spec, dtype))
        costs = mx.diagonal(hessian.matrix)
        judge("grid", fit_groups(target, costs, group, self._levels, dtype))
        grid = gptq(target, hessian, group, self._levels, dtype)
        judge("gptq", grid)
        for number in range(self.rounds):
            grid = refit(grid, target, hessian.matrix, dtype)
            grid = coordinate_descent(grid, target, hessian.matrix, self._levels)
            judge(f"descent {number + 1}", grid)
            grid = judge.best
        for way, error in (judge.lost | {"kept": judge.least.sum().item()}).items():
            self.lost[way] = self.lost.get(way, 0.0) + error
        self._output += judge.output
        self.parts.append(_packed(judge.best, self.spec, dtype))
        return judge.best

    def solution(self, order: mx.array | None = None) -> QuantizedLayer:
        """All parts together, their rows in another order if one is given."""
        tensors = {
            name: mx.concatenate([part[name] for part in self.parts])
            for name in self.parts[0]
        }
        if order is not None:
            tensors = {name: value[order] for name, value in tensors.items()}
        mx.eval(tensors)
        output = self._output or 1.0
        return QuantizedLayer(
            tensors, {way: e / output for way, e in self.lost.items()}
        )


def _packed(grid: AffineGrid, spec: QuantSpec, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A grid as it is stored; of the codes nothing else is left in memory."""
    tensors = {
        "weight": pack_codes(grid.codes, spec.bits),
        "scales": grid.scales.astype(dtype),
        "biases": grid.biases.astype(dtype),
    }
    mx.eval(tensors)
    return tensors


class BestGridTracker:
    """Keeps the best grid of every row.

    Attributes:
        best: of those met so far.
        least: float32 [N], what every row of it loses.
        lost: by every way, its squared error on the layer's inputs.
        output: the same for no weights at all.
    """

    def __init__(self, target: mx.array, matrix: mx.array, dtype: mx.Dtype):
        self.target = target
        self.matrix = matrix
        self.dtype = dtype
        self.lost: dict[str, float] = {}
        self.output = ((target @ matrix) * target).sum().item()
        self.least: mx.array | None = None

    def __call__(self, way: str, grid: AffineGrid) -> None:
        """Judge a grid as it is stored."""
        off = grid.weight(self.dtype) - self.target
        errors = ((off @ self.matrix) * off).sum(axis=1)
        self.lost[way] = errors.sum().item()
        if self.least is None:
            self.best, self.least = grid, errors
        else:
            self.best = grid.over(self.best, errors < self.least)
            self.least = mx.minimum(errors, self.least)
        mx.eval(self.least, vars(self.best))


def rounded_layer(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> AffineGrid:
    """MLX's own grids and nearest codes."""
    packed = pack(weight, spec, dtype)
    scales, biases = (packed[k].astype(mx.float32) for k in ("scales", "biases"))
    codes = unpack_codes(packed["weight"], spec.bits).astype(mx.float32)
    return AffineGrid(codes, scales, biases)
