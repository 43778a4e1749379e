"""Codes, scales and biases of one layer that lose least on its inputs.

GPTQ (arXiv 2210.17323) with grids fitted on the way and the costliest columns first,
towards a target that makes up for earlier layers' errors (arXiv 2504.02692,
2505.11695); then, in turns, all scales and biases by least squares with the full
Hessian, and codes by coordinate descent (arXiv 2309.01885). Rows are independent of
each other, so each keeps the best it has met, plain rounding among them.
"""

from dataclasses import dataclass

import mlx.core as mx

from .codes import pack_codes, unpack_codes
from .columns import descend, fitted, gptq
from .grid import Grid
from .hessian import Hessian
from .refit import refit
from .spec import QuantSpec, pack

# Numbers of a weight solved at once; about ten float32 arrays of them are in memory.
AT_ONCE = 1 << 21


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
    rows = max(1, AT_ONCE // weight.shape[1])
    parts: list[dict[str, mx.array]] = []
    lost: dict[str, float] = {}
    output = 0.0
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        grid, errors, whole = _solved(part, hessian, spec, dtype, cross, settings)
        parts.append(_packed(grid, spec, dtype))
        output += whole
        lost = {way: lost.get(way, 0.0) + error for way, error in errors.items()}
    tensors = {k: mx.concatenate([part[k] for part in parts]) for k in parts[0]}
    mx.eval(tensors)
    return Solution(tensors, {way: e / (output or 1.0) for way, e in lost.items()})


def _packed(grid: Grid, spec: QuantSpec, dtype: mx.Dtype) -> dict[str, mx.array]:
    """A grid as it is stored; of the codes nothing else is left in memory."""
    tensors = {
        "weight": pack_codes(grid.codes, spec.bits),
        "scales": grid.scales.astype(dtype),
        "biases": grid.biases.astype(dtype),
    }
    mx.eval(tensors)
    return tensors


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
    costs = mx.diagonal(hessian.matrix)
    judge("grid", fitted(target, costs, spec.group_size, levels, dtype))
    grid = gptq(target, hessian, spec.group_size, levels, dtype)
    judge("gptq", grid)
    for number in range(settings.rounds):
        grid = refit(grid, target, hessian.matrix, dtype)
        grid = descend(grid, target, hessian.matrix, levels)
        judge(f"descent {number + 1}", grid)
        grid = judge.best
    kept = {"kept": judge.least.sum().item()}
    return judge.best, judge.lost | kept, judge.output


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
