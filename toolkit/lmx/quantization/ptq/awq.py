"""Ranges of groups drawn in, where that loses less of what a layer puts out.

AWQ's clipping (arXiv 2306.00978, as its code has it): weights beyond the range are cut
off, and the grid of what is left is finer.
"""

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ...config.quantize import AWQConfig
from ..packing import expand, pack
from .awq_scaling import AWQScaler, BlockError, ScalingResult, rounded
from .base import PTQContext
from .block_context import BlockContext, Weights
from .input_statistics import InputStatistics
from .sequential import QuantizedTensor, quantize_sequentially, quantized_tensor

# How far both ends are drawn in, as a share of them.
SHRINKS = tuple(1 - step / 20 for step in range(1, 11))
# Numbers of a weight tried at once.
AT_ONCE = 1 << 24


def group_costs(squares: mx.array, group: int) -> mx.array:
    """The second moments of every group's inputs, [G, g, g], out of all, [K, K]."""
    groups = mx.arange(len(squares) // group)
    return squares.reshape(-1, group, len(groups), group)[groups, :, groups]


def clipped(
    weight: mx.array, costs: mx.array, spec: QuantSpec, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Round a weight [N, K] on the best of the grids that drawn-in ranges have.

    Every group of a row has its own; MLX's own, of the whole range, is one of them.

    Args:
        costs: float32 [G, g, g], of `group_costs`.
        dtype: the type the checkpoint stores.

    Returns:
        What a checkpoint stores: weight (codes), scales and biases.
    """
    rows = max(1, AT_ONCE // weight.shape[1])
    parts = [
        _clipped(weight[start : start + rows], costs, spec, dtype)
        for start in range(0, len(weight), rows)
    ]
    return {k: mx.concatenate([part[k] for part in parts]) for k in parts[0]}


def _clipped(weight: mx.array, costs: mx.array, spec: QuantSpec, dtype: mx.Dtype):
    groups = weight.astype(mx.float32).reshape(len(weight), len(costs), -1)
    low, high = (f(groups, axis=-1, keepdims=True) for f in (mx.min, mx.max))
    best, least = None, None
    for shrink in (1.0, *SHRINKS):
        inside = mx.clip(groups, shrink * low, shrink * high)
        packed = pack(inside.reshape(weight.shape), spec, dtype)
        off = expand(packed, spec, dtype).reshape(groups.shape) - groups
        off = off.swapaxes(0, 1)
        error = ((off @ costs) * off).sum(axis=-1).T
        by_group = {k: v.reshape(*error.shape, -1) for k, v in packed.items()}
        if best is None:
            best, least = by_group, error
        else:
            is_better = (error < least)[..., None]
            best = {k: mx.where(is_better, by_group[k], best[k]) for k in best}
            least = mx.minimum(error, least)
        mx.eval(best, least)
    return {name: value.reshape(len(weight), -1) for name, value in best.items()}


# --- from quant.methods.awq: AWQ (arXiv 2306.00978): scales and clipped ranges, then plain rounding.
#
# Channels with large inputs are scaled up before the layer is rounded, which its block
# makes up for elsewhere, and ranges are clipped. Both are searched on the inputs that the
# quantized model has, and done only where a block then loses less on other tokens.


def quantize(config: AWQConfig, task: PTQContext) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored, and
    the dense weights that had a scale folded in."""
    method = AWQ(task)
    tensors = quantize_sequentially(
        config,
        task,
        method.solve,
        method.prepare,
        compares=False,
        weighs_embeddings=False,
    )
    method.folding.sum_up()
    return tensors


class AWQ:
    def __init__(self, task: PTQContext):
        self.task = task
        self.folding = AWQScaler(task)
        self._clipped: set[str] = set()

    def prepare(self, opened: BlockContext) -> Weights:
        """Fold, and find out which layers are better clipped."""
        found = self.folding.folded(opened)
        self._clipped = self._worth_clipping(opened, found)
        names = ", ".join(sorted(self._clipped)) or "none"
        self.task.logger.debug(f"clipped ranges in {opened.prefix}: {names}")
        return found.weights

    def solve(
        self, weights: dict[str, mx.array], moments: InputStatistics | None
    ) -> dict[str, QuantizedTensor]:
        """Round layers that share an input."""
        task, found = self.task, {}
        for path, weight in weights.items():
            if path in self._clipped and moments is not None:
                tensors = self._clip(path, weight, moments)
            else:
                tensors = pack(weight, task.specs[path], task.dtype)
            found[path] = quantized_tensor(tensors, task.specs[path], task.dtype)
        return found

    def _worth_clipping(self, opened: BlockContext, found: ScalingResult) -> set[str]:
        """Layers by which the block loses less when clipped, tried one by one."""
        rounding = self._rounding(opened)
        now = rounded(found.weights, opened.paths, rounding)
        least, chosen = found.after, set()
        for path in opened.paths:
            moments = _moments(found.search, found.weights, path)
            if moments is None:
                continue
            name, whole = f"{path}.weight", opened.prefix + path
            spec, dtype = self.task.specs[whole], self.task.dtype
            tensors = self._clip(whole, found.weights[name], moments)
            dense = expand(tensors, spec, dtype).astype(mx.float32)
            error = found.held.error(now | {name: dense})
            if error < least:
                now, least = now | {name: dense}, error
                chosen.add(whole)
        return chosen

    def _rounding(self, opened: BlockContext):
        return lambda path, weight: self.folding.rounded(opened.prefix + path, weight)

    def _clip(self, path: str, weight: mx.array, moments: InputStatistics):
        spec, dtype = self.task.specs[path], self.task.dtype
        if weight.ndim == 2:
            costs = group_costs(moments.squares, spec.group_size)
            return clipped(weight, costs, spec, dtype)
        parts = [
            clipped(own, group_costs(squares, spec.group_size), spec, dtype)
            for own, squares in zip(weight, moments.squares, strict=True)
        ]
        return {name: mx.stack([part[name] for part in parts]) for name in parts[0]}


def _moments(trial: BlockError, weights: Weights, path: str) -> InputStatistics | None:
    """Of what goes into a layer of the block in full precision; None = nothing."""
    seen = trial.inputs(weights, [path])
    if path not in seen.rows:
        return None
    weight, rows = weights[f"{path}.weight"], seen.rows[path]
    experts = len(weight) if path in seen.experts else None
    found = InputStatistics.empty(weight.shape[-1], experts=experts, with_cross=False)
    if experts is None:
        found.add(rows)
    else:
        found.add_routed(rows, seen.experts[path])
    return found
