"""Codes, scales and biases of one layer that lose least on its inputs.

GPTQ (arXiv 2210.17323) with grids fitted on the way and the costliest columns first,
towards a target that makes up for earlier layers' errors (`making_up`); then, in turns,
all scales and biases by least squares with the full Hessian, and codes by coordinate
descent (arXiv 2309.01885). Every row keeps the best it has met, plain rounding among
them. Where it is known how the loss answers to the outputs, rows then make up for each
other's errors (`coupled`).
"""

from dataclasses import dataclass
from math import ceil

import mlx.core as mx

from .codes import pack_codes, unpack_codes
from .columns import descend, fitted, gptq
from .coupled import LEAST_ROWS, SETS, Coupling, coupling
from .grid import Grid
from .hessian import Hessian
from .making_up import Missing
from .refit import refit
from .spec import QuantSpec, pack

# Numbers of a weight solved at once; about ten float32 arrays of them are in memory.
AT_ONCE = 1 << 21


@dataclass(frozen=True)
class Solution:
    """A layer as it is stored, and what it loses.

    Attributes:
        tensors: weight (packed codes), scales and biases.
        errors: what every way loses by itself, as a share of the output; `kept` last.
    """

    tensors: dict[str, mx.array]
    errors: dict[str, float]


def solve(
    weight: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    missing: Missing | None = None,
    answers: mx.array | None = None,
    rounds: int = 3,
) -> Solution:
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
    layer = _Layer(hessian, spec, dtype, missing, rounds)
    sets = min(SETS, ceil(len(weight) / LEAST_ROWS))
    sets = max(sets, ceil(weight.size / AT_ONCE))
    rows = None if answers is None else coupling(answers, sets)
    if rows is None:
        at_once = max(1, AT_ONCE // weight.shape[1])
        for start in range(0, len(weight), at_once):
            here = slice(start, start + at_once)
            layer.solve(weight[here], layer.target(weight[here], here))
        return layer.solution()
    _solve_coupled(layer, weight[rows.order], rows)
    return layer.solution(mx.argsort(rows.order))


def _solve_coupled(layer: "_Layer", weight: mx.array, rows: Coupling) -> None:
    """Set by set; to every one the later ones are free to make up for its errors."""
    shifts = [mx.array(0.0)] * len(rows.sets)
    for number, here in enumerate(rows.sets):
        target = layer.target(weight[here], rows.order[here]) + shifts[number]
        errors = layer.solve(weight[here], target).weight(layer.dtype) - target
        for later, more in enumerate(rows.passed_on(number, errors), number + 1):
            shifts[later] = shifts[later] + more
        mx.eval(shifts)


class _Layer:
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

    def solve(self, weight: mx.array, target: mx.array) -> Grid:
        """The next part, in every way; every row keeps its best."""
        hessian, group, dtype = self.hessian, self.spec.group_size, self.dtype
        judge = Judge(target, hessian.matrix, dtype)
        judge("round to nearest", rounded(weight, self.spec, dtype))
        costs = mx.diagonal(hessian.matrix)
        judge("grid", fitted(target, costs, group, self._levels, dtype))
        grid = gptq(target, hessian, group, self._levels, dtype)
        judge("gptq", grid)
        for number in range(self.rounds):
            grid = refit(grid, target, hessian.matrix, dtype)
            grid = descend(grid, target, hessian.matrix, self._levels)
            judge(f"descent {number + 1}", grid)
            grid = judge.best
        for way, error in (judge.lost | {"kept": judge.least.sum().item()}).items():
            self.lost[way] = self.lost.get(way, 0.0) + error
        self._output += judge.output
        self.parts.append(_packed(judge.best, self.spec, dtype))
        return judge.best

    def solution(self, order: mx.array | None = None) -> Solution:
        """All parts together, their rows in another order if one is given."""
        tensors = {
            name: mx.concatenate([part[name] for part in self.parts])
            for name in self.parts[0]
        }
        if order is not None:
            tensors = {name: value[order] for name, value in tensors.items()}
        mx.eval(tensors)
        output = self._output or 1.0
        return Solution(tensors, {way: e / output for way, e in self.lost.items()})


def _packed(grid: Grid, spec: QuantSpec, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A grid as it is stored; of the codes nothing else is left in memory."""
    tensors = {
        "weight": pack_codes(grid.codes, spec.bits),
        "scales": grid.scales.astype(dtype),
        "biases": grid.biases.astype(dtype),
    }
    mx.eval(tensors)
    return tensors


class Judge:
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

    def __call__(self, way: str, grid: Grid) -> None:
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


def rounded(weight: mx.array, spec: QuantSpec, dtype: mx.Dtype) -> Grid:
    """MLX's own grids and nearest codes."""
    packed = pack(weight, spec, dtype)
    scales, biases = (packed[k].astype(mx.float32) for k in ("scales", "biases"))
    codes = unpack_codes(packed["weight"], spec.bits).astype(mx.float32)
    return Grid(codes, scales, biases)
