"""Quantize layers to the least output error on their inputs.

GPTQ (arXiv 2210.17323) goes through the columns, the costliest groups first, and fits
the scale and bias of each group on the way. Then least squares refits all scales and
biases with the full Hessian, and coordinate descent improves the codes (arXiv
2309.01885), in turns. Every row keeps the best grid it has had; RTN is one of them.

Layers with the same input have the same Hessian, so their rows are solved together:
the time of a column update hardly depends on the number of rows.

With the Fisher information of the outputs, rows compensate for each other's errors. If
H is the Hessian of the inputs and A that of the outputs, errors E cost tr(A E H E'):
the KL divergence to second order if inputs and gradients are independent (YAQA, arXiv
2505.22988, sections 3 and 4). Rows are solved in sets. The error of a set shifts the
targets of later sets, as the error of a column shifts later columns in GPTQ.

Several processes divide the rows of every set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

import mlx.core as mx

from ....config.quant_spec import QuantSpec
from ....interfaces import SINGLE_PROCESS, Communicator
from ...affine_grid import AffineGrid, fit_grid, nearest, safe_scale
from ...backend import async_eval, library, to_fast_backend
from ...packing import pack
from ..hessian import Hessian, OutputHessian
from ..input_statistics import OutputError
from .column_updates import BestGridTracker, descent_columns, gptq_columns, stack_groups
from .float_solver import solve_float_rows
from .gguf_solver import solve_gguf_rows

# Row sets with an output Hessian. More compensate better and take longer.
MAX_SETS = 4
# Rows of such a set, at least.
MIN_ROWS_PER_SET = 32
# Elements of all weights that are solved at once, in about ten float32 arrays.
MAX_ELEMENTS = 1 << 21
# Elements of the largest array of a refit.
MAX_REFIT_ELEMENTS = 1 << 24
RIDGE = 1e-4


@dataclass(frozen=True)
class LayerProblem:
    """A weight to quantize.

    Attributes:
        weight: [N, K].
        output_error: error of the outputs to compensate for. None = none.
        output_fisher: float32 [N, N], Fisher information of the outputs. None = rows
            are independent.
    """

    weight: mx.array
    output_error: OutputError | None = None
    output_fisher: mx.array | None = None


@dataclass(frozen=True)
class QuantizedLayer:
    """The stored tensors of a layer and the errors of all candidates.

    Attributes:
        tensors: weight (packed codes), scales and biases.
        errors: squared error of the output by candidate, relative to the output. The
            last one, `best`, belongs to `tensors`.
    """

    tensors: dict[str, mx.array]
    errors: dict[str, float]


def solve_layers(
    layers: Mapping[str, LayerProblem],
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    refine_iters: int = 3,
    ranks: Communicator = SINGLE_PROCESS,
    solve: Callable[..., BestGridTracker] | None = None,
) -> dict[str, QuantizedLayer]:
    """Quantize the weights of layers that share their input.

    Args:
        hessian: of the inputs in the quantized model.
        dtype: dtype that scales and biases are stored in.
        refine_iters: rounds of refit and coordinate descent after GPTQ.
        ranks: the processes that divide the rows; all have the same layers.
        solve: solves rows, as `solve_rows` does. None = by GPTQ on the grid of `spec`.
    """
    if solve is None and spec.is_gguf:
        solve = solve_gguf_rows
    elif solve is None:
        solve = solve_rows if spec.mode == "affine" else solve_float_rows
    num_sets = _num_sets(layers, ranks.size)
    solutions = {k: _LayerRows(v, num_sets) for k, v in layers.items()}
    for index in range(num_sets):
        present = [rows for rows in solutions.values() if index < len(rows.sets)]
        sizes = [rows.size(index) for rows in present]
        # The rows of each layer's set that this process solves.
        own_rows, own, end = ranks.own_rows(sum(sizes)), [], 0
        for rows, size in zip(present, sizes, strict=True):
            start, end = end, end + size
            if part := [row - start for row in own_rows if start <= row < end]:
                own.append((rows, mx.array(part)))
        weight = mx.concatenate([rows.weight(index, part) for rows, part in own])
        target = mx.concatenate([rows.target(index)[part] for rows, part in own])
        best = solve(weight, target, hessian, spec, dtype, refine_iters=refine_iters)
        del target, weight
        best.gather(ranks, sum(sizes))
        end = 0
        for rows, size in zip(present, sizes, strict=True):
            rows.add_solution(index, best, slice(end, end := end + size), spec)
        del best  # before the arrays of the next rows exist
    return {name: rows.quantized() for name, rows in solutions.items()}


def _num_sets(layers: Mapping[str, LayerProblem], num_ranks: int) -> int:
    """Row sets, so that rows can compensate and the arrays of a set are not large."""
    coupled = [v for v in layers.values() if v.output_fisher is not None]
    longest = max((len(layer.weight) for layer in coupled), default=0)
    num_sets = min(MAX_SETS, ceil(longest / MIN_ROWS_PER_SET))
    size = sum(layer.weight.size for layer in layers.values())
    # Sets that compensate decide the result, whatever the number of processes.
    at_once = MAX_ELEMENTS * (1 if coupled else num_ranks)
    return max(1, num_sets, ceil(size / at_once))


class _LayerRows:
    """The rows of one layer, which are solved in sets."""

    def __init__(self, layer: LayerProblem, num_sets: int):
        size, fisher = len(layer.weight), layer.output_fisher
        coupling = None
        if fisher is not None:
            coupling = OutputHessian.from_fisher(fisher, num_sets)
        self._layer, self._coupling = layer, coupling
        if coupling:
            self.sets, self._order = coupling.sets, coupling.order
        else:
            step = ceil(size / num_sets)
            self.sets = [slice(row, row + step) for row in range(0, size, step)]
            self._order = mx.arange(size)
        self._shifts = [mx.array(0.0)] * len(self.sets)
        self._packed: list[dict[str, mx.array]] = []
        self._errors: dict[str, float] = {}
        self._output = 0.0

    def size(self, index: int) -> int:
        """Number of rows of a set."""
        return len(self._rows(index))

    def weight(self, index: int, part: mx.array | slice = slice(None)) -> mx.array:
        """A part of the rows of a set."""
        return self._layer.weight[self._rows(index)[part]]

    def target(self, index: int) -> mx.array:
        """Rows that compensate for the output error and for earlier sets, float32.

        All of a set: a small product of some of them is rounded otherwise.
        """
        weight = self.weight(index).astype(mx.float32)
        target, error = weight + self._shifts[index], self._layer.output_error
        if error is not None and error.strength:
            target = target + error.correction(weight, self._rows(index))
        return target

    def _rows(self, index: int) -> mx.array:
        """The rows of the weight in a set."""
        return self._order[self.sets[index]]

    def add_solution(
        self, index: int, best: BestGridTracker, part: slice, spec: QuantSpec
    ) -> None:
        """Keep the solution of a set, which is a part of the solved rows."""
        grid = best.grid[part]
        tensors = grid.tensors(spec)
        for name, value in tensors.items():
            if value.dtype == mx.float32:
                tensors[name] = value.astype(best.dtype)
        # So that the unpacked codes are freed.
        mx.eval(tensors)
        self._packed.append(tensors)
        for name, errors in best.candidates.items():
            error = errors[part].sum().item()
            self._errors[name] = self._errors.get(name, 0.0) + error
        self._output += best.output[part].sum().item()
        if self._coupling:
            residual = grid.weight(best.dtype) - best.target[part]
            later = self._coupling.compensation(index, residual)
            for other, shift in enumerate(later, index + 1):
                self._shifts[other] = self._shifts[other] + shift
            mx.eval(self._shifts)

    def quantized(self) -> QuantizedLayer:
        """The tensors of all sets in the order of the weight's rows."""
        tensors = {
            name: mx.concatenate([part[name] for part in self._packed])
            for name in self._packed[0]
        }
        if self._coupling:
            original = mx.argsort(self._order)
            tensors = {name: value[original] for name, value in tensors.items()}
        mx.eval(tensors)
        output = self._output or 1.0
        return QuantizedLayer(tensors, {k: e / output for k, e in self._errors.items()})


def solve_rows(
    weight: mx.array,
    target: mx.array,
    hessian: Hessian,
    spec: QuantSpec,
    dtype: mx.Dtype,
    *,
    refine_iters: int,
) -> BestGridTracker:
    """The best affine grid of every row for a target, float32 [N, K]."""
    group_size, levels = spec.group_size, 2.0**spec.bits
    best = BestGridTracker(target, hessian.matrix, dtype)
    best.add_grid("RTN", AffineGrid.from_tensors(pack(weight, spec, dtype), spec))
    best.add_grid("GPTQ", gptq(target, hessian, group_size, levels, dtype))
    for iteration in range(refine_iters):
        grid = refit(best.grid, best.descent, hessian.matrix, dtype)
        descent = (target - grid.weight(dtype)) @ hessian.matrix
        grid = coordinate_descent(grid, descent, hessian.matrix, levels)
        best.add_grid(f"refined {iteration + 1}", grid)
    best.candidates["best"] = best.errors
    return best


def fit_groups(
    target: mx.array, costs: mx.array, group_size: int, levels: float, dtype: mx.Dtype
) -> AffineGrid:
    """Fit the grid of every group on its own, with nearest codes.

    Args:
        costs: float32 [K], of a squared error in each column.
    """
    rows, costs = to_fast_backend(target.T), to_fast_backend(costs)
    groups = []
    for start in range(0, len(rows), group_size):
        columns = slice(start, start + group_size)
        scale, bias = fit_grid(rows[columns], costs[columns], levels, dtype)
        divisor, top = safe_scale(scale, levels)
        codes = nearest((rows[columns] - bias) / divisor, top)
        groups.append((codes, scale, bias))
        async_eval(groups[-1])
    return AffineGrid(*stack_groups(groups))


def gptq(
    target: mx.array,
    hessian: Hessian,
    group_size: int,
    levels: float,
    dtype: mx.Dtype,
) -> AffineGrid:
    """Quantize column by column. Later columns compensate for the error of each.

    Columns go in the order of the Hessian. The grid of a group is fitted when the scan
    reaches it, to weights that include the compensation so far.
    """
    factor, order = to_fast_backend(hessian.factor), hessian.order
    remaining = to_fast_backend(target[:, order].T)
    groups = []
    for start in range(0, len(factor), group_size):
        columns = slice(start, start + group_size)
        block, rows = factor[columns, columns], remaining[:group_size]
        costs = 1 / library(block).diagonal(block) ** 2
        scale, bias = fit_grid(rows, costs, levels, dtype)
        divisor, top = safe_scale(scale, levels)
        codes, errors = gptq_columns(rows, block, divisor, bias, top)
        spread = factor[columns, start + group_size :].T @ errors
        remaining = remaining[group_size:] - spread
        groups.append((codes, scale, bias))
        async_eval((remaining, *groups[-1]))
    codes, scales, biases = stack_groups(groups)
    columns, by_group = mx.argsort(order), mx.argsort(order[::group_size])
    return AffineGrid(codes[:, columns], scales[:, by_group], biases[:, by_group])


def coordinate_descent(
    grid: AffineGrid, descent: mx.array, matrix: mx.array, levels: float
) -> AffineGrid:
    """One sweep over all codes: each moves to its minimum with the others fixed.

    Args:
        descent: float32 [N, K], (target - weight) times the matrix.
    """
    descent = to_fast_backend(descent.T)
    old_codes, matrix = to_fast_backend(grid.codes.T), to_fast_backend(matrix)
    scales, biases = to_fast_backend(grid.scales.T), to_fast_backend(grid.biases.T)
    groups = []
    for number, start in enumerate(range(0, len(old_codes), grid.group)):
        columns, scale = slice(start, start + grid.group), scales[number]
        divisor, top = safe_scale(scale, levels)
        block, rows = matrix[columns, columns], descent[: grid.group]
        codes, changes = descent_columns(
            rows, block, old_codes[columns], scale, divisor, top
        )
        spread = matrix[start + grid.group :, columns] @ changes
        descent = descent[grid.group :] - spread
        groups.append((codes, scale, biases[number]))
        async_eval((descent, codes))
    return AffineGrid(*stack_groups(groups))


def refit(
    grid: AffineGrid, descent: mx.array, matrix: mx.array, dtype: mx.Dtype
) -> AffineGrid:
    """Fit all scales and biases to the codes at once, by least squares.

    Args:
        descent: float32 [N, K], (target - weight) times the matrix.
    """
    groups = grid.scales.shape[1]
    blocks = matrix.reshape(groups, grid.group, groups, grid.group)
    size = max(1, MAX_REFIT_ELEMENTS // (groups * len(matrix)))
    fitted = []
    for start in range(0, len(descent), size):
        rows = slice(start, start + size)
        fitted.append(_refit_rows(grid[rows], descent[rows], blocks, dtype))
        mx.eval(fitted[-1])
    scales, biases = (mx.concatenate(v) for v in zip(*fitted, strict=True))
    return AffineGrid(grid.codes, scales, biases)


def _refit_rows(grid: AffineGrid, descent: mx.array, blocks: mx.array, dtype: mx.Dtype):
    groups, group_size = blocks.shape[:2]
    width = groups * group_size
    codes = grid.codes.reshape(-1, groups, group_size)
    # Centered codes, as scales and biases would otherwise be nearly collinear.
    center = codes.mean(axis=-1)
    codes = codes - center[..., None]
    moments = codes.swapaxes(0, 1) @ blocks.reshape(groups, group_size, width)
    moments = moments.reshape(groups, -1, groups, group_size)
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
    descent = descent.reshape(-1, groups, group_size)
    sums = mx.concatenate(
        [(descent * codes).sum(axis=-1), descent.sum(axis=-1)], axis=1
    )
    diagonal = mx.diagonal(system, axis1=1, axis2=2)
    ridge = RIDGE * diagonal + 1e-6 * diagonal.mean(axis=1, keepdims=True)
    system = system + ridge[..., None] * mx.eye(2 * groups)
    with mx.stream(mx.cpu):
        step = mx.linalg.solve(system, sums[..., None])[..., 0]
    middle = grid.biases + center * grid.scales + step[:, groups:]
    scales = (grid.scales + step[:, :groups]).astype(dtype).astype(mx.float32)
    # The bias compensates for the rounding of the scale.
    biases = (middle - center * scales).astype(dtype).astype(mx.float32)
    return scales, biases
