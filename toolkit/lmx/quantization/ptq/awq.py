"""AWQ (arXiv 2306.00978): scaled channels and clipped ranges, then RTN.

Channels with large inputs are scaled up before a layer is quantized, and its block
undoes the scale elsewhere. Clipping shrinks the range of a group, so that its grid is
finer. Both are searched on the inputs of the quantized model, and applied only if they
reduce the error of the block on other tokens.
"""

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ...config.quantize import AWQConfig
from ..packing import dequantize, pack
from ..target_layers import has_known_inputs
from .awq_scaling import AWQScaler, BlockError, ScalingResult, quantized_weights
from .base import BlockContext, PTQContext, PTQMethod, QuantizedTensor, Weights
from .input_statistics import InputStatistics
from .sequential import SequentialPipeline

# Factors by which both ends of a range are clipped.
CLIP_FACTORS = tuple(1 - step / 20 for step in range(1, 11))
# Elements of a weight that are clipped at once.
MAX_ELEMENTS = 1 << 24


class AWQ(PTQMethod):
    """Scale salient channels, clip ranges, and round to nearest."""

    def __init__(self, config: AWQConfig, context: PTQContext):
        super().__init__(config, context)
        self.scaler = AWQScaler(context)
        self._clipped: set[str] = set()

    def quantize(self) -> dict[str, mx.array]:
        """Quantize the layers in `context.specs`.

        Returns:
            Packed codes, scales and biases by name, and the dense weights that changed.
        """
        tensors = SequentialPipeline.from_method(self).run()
        self.scaler.log_summary()
        return tensors

    def prepare_block(self, block: BlockContext) -> Weights:
        result = self.scaler.scale(block)
        self._clipped = self._layers_to_clip(block, result)
        names = ", ".join(sorted(self._clipped)) or "none"
        self.context.logger.debug(f"clipped ranges in {block.prefix}: {names}")
        return result.weights

    def quantize_group(
        self, weights: dict[str, mx.array], statistics: InputStatistics | None
    ) -> dict[str, QuantizedTensor]:
        context, quantized = self.context, {}
        for path, weight in weights.items():
            if path in self._clipped and statistics is not None:
                tensors = self._clip(path, weight, statistics)
                quantized[path] = context.quantized_tensor(path, tensors)
            else:
                quantized[path] = context.rtn(path, weight)
        return quantized

    def _layers_to_clip(self, block: BlockContext, result: ScalingResult) -> set[str]:
        """Layers whose clipping reduces the error of the block, tried one by one."""
        weights = quantized_weights(
            result.weights, block.paths, self.scaler.quantizer(block)
        )
        best_error, clipped_paths = result.after, set()
        modules = dict(block.block.named_modules())
        for path in block.paths:
            name, full_path = f"{path}.weight", block.prefix + path
            spec, dtype = self.context.specs[full_path], self.context.dtype
            if spec.mode != "affine" or not has_known_inputs(modules[path]):
                continue
            statistics = _input_statistics(result.search, result.weights, path)
            if statistics is None:
                continue
            tensors = self._clip(full_path, result.weights[name], statistics)
            dense = dequantize(tensors, spec, dtype).astype(mx.float32)
            error = result.validation.error(weights | {name: dense})
            if error < best_error:
                weights, best_error = weights | {name: dense}, error
                clipped_paths.add(full_path)
        return clipped_paths

    def _clip(self, path: str, weight: mx.array, statistics: InputStatistics):
        spec, dtype = self.context.specs[path], self.context.dtype
        moments = statistics.second_moments
        if weight.ndim == 2:
            return clip(weight, group_moments(moments, spec.group_size), spec, dtype)
        experts = [
            clip(expert, group_moments(squares, spec.group_size), spec, dtype)
            for expert, squares in zip(weight, moments, strict=True)
        ]
        return {k: mx.stack([expert[k] for expert in experts]) for k in experts[0]}


def group_moments(moments: mx.array, group_size: int) -> mx.array:
    """The second moments of each group's inputs [G, g, g], from all of them [K, K]."""
    groups = mx.arange(len(moments) // group_size)
    return moments.reshape(-1, group_size, len(groups), group_size)[groups, :, groups]


def clip(
    weight: mx.array, moments: mx.array, spec: QuantSpec, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Quantize a weight [N, K] with the best clipped range of each group of each row.

    MLX's own grid, of the full range, is one of the candidates.

    Args:
        moments: float32 [G, g, g], see `group_moments`.
        dtype: dtype that the checkpoint stores.

    Returns:
        The stored tensors: weight (codes), scales and biases.
    """
    rows = max(1, MAX_ELEMENTS // weight.shape[1])
    parts = [
        _clip_rows(weight[start : start + rows], moments, spec, dtype)
        for start in range(0, len(weight), rows)
    ]
    return {k: mx.concatenate([part[k] for part in parts]) for k in parts[0]}


def _clip_rows(weight: mx.array, moments: mx.array, spec: QuantSpec, dtype: mx.Dtype):
    groups = weight.astype(mx.float32).reshape(len(weight), len(moments), -1)
    low, high = (f(groups, axis=-1, keepdims=True) for f in (mx.min, mx.max))
    best, best_error = None, None
    for factor in (1.0, *CLIP_FACTORS):
        clipped = mx.clip(groups, factor * low, factor * high)
        packed = pack(clipped.reshape(weight.shape), spec, dtype)
        off = dequantize(packed, spec, dtype).reshape(groups.shape) - groups
        off = off.swapaxes(0, 1)
        error = ((off @ moments) * off).sum(axis=-1).T
        by_group = {k: v.reshape(*error.shape, -1) for k, v in packed.items()}
        if best is None:
            best, best_error = by_group, error
        else:
            is_better = (error < best_error)[..., None]
            best = {k: mx.where(is_better, by_group[k], best[k]) for k in best}
            best_error = mx.minimum(error, best_error)
        mx.eval(best, best_error)
    return {name: value.reshape(len(weight), -1) for name, value in best.items()}


def _input_statistics(
    block: BlockError, weights: Weights, path: str
) -> InputStatistics | None:
    """Statistics of a layer's input in the full-precision block. None = not called."""
    captured = block.capture_inputs(weights, [path])
    if path not in captured.rows:
        return None
    weight, rows = weights[f"{path}.weight"], captured.rows[path]
    experts = len(weight) if path in captured.experts else None
    width = weight.shape[-1]
    statistics = InputStatistics.empty(width, experts=experts, with_cross=False)
    if experts is None:
        statistics.add(rows)
    else:
        statistics.add_routed(rows, captured.experts[path])
    return statistics
