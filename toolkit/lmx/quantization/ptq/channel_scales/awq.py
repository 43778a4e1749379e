"""AWQ (arXiv 2306.00978): scale the channels that matter, then clip and round.

A channel with large inputs is multiplied by a scale in the weights, so that its error
is smaller relative to it, and divided by it in the layer before. The scale is the mean
magnitude of the inputs to a power. Of a grid of powers, each place in turn gets the one
with the least error of the block's output while all layers of the block are rounded.
Power 0 is among them, so the error never rises above that of RTN.

Then the range of each group is clipped to the least error of its output, in sequence,
for the inputs that the quantized model gives. Both steps are without gradients.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ....config.quant_spec import K_BLOCK
from ....config.quantize import AWQConfig, PTQConfig
from ...target_layers import BLOCK_PREFIX
from ..base import PTQContext, Weights
from ..gptq.clipping import clip_rows, fitted_rows
from ..gptq.gptq import GPTQ
from ..sequential import SequentialPipeline
from .channel_scales import ScaledBlock, ScaleObjective, find_scales, positive
from .scale_mappings import ScaleMapping

# Powers of the mean magnitude. Fitted grids need lower ones than those of RTN.
POWERS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
# Tokens whose outputs are compared, and tokens that the magnitudes are means over, if
# the recipe gives no number.
SEARCH_TOKENS, NUM_TOKENS = 1 << 10, 1 << 13
# Places in most blocks, for estimates.
PLACES = 4


class BlockError(ScaleObjective):
    """Scales by the squared error of the block's output."""

    name, key, hint = "awq", (POWERS, SEARCH_TOKENS), "method: rtn"

    def __init__(self, config: PTQConfig, context: PTQContext):
        self.context = context
        self.num_tokens = config.calibration.num_tokens or NUM_TOKENS

    def measured_layer(
        self, mapping: ScaleMapping, layers: dict[str, nn.Module]
    ) -> str | None:
        return next(iter(layers))

    def magnitude(self, rows: mx.array) -> mx.array:
        return rows.sum(axis=(0, 1))

    def scale(
        self, block: ScaledBlock, mapping: ScaleMapping, path: str, weights: Weights
    ) -> mx.array:
        magnitudes = mapping.channels(block.magnitudes[path])
        others = self._rounded(block, weights, block.magnitudes)

        def errors(powers: Iterable[float]) -> Iterator[float]:
            for power in powers:
                scale = power_scale(magnitudes, power)
                columns = mapping.columns(scale)
                inputs = block.magnitudes | {
                    name: block.magnitudes[name] / columns for name in mapping.consumers
                }
                changed = mapping.apply(weights, scale)
                yield _error(block, others | self._rounded(block, changed, inputs))

        by_power = self.context.ranks.divide(POWERS, errors)
        best = min(range(len(POWERS)), key=by_power.__getitem__)
        return power_scale(magnitudes, POWERS[best])

    def _rounded(
        self, block: ScaledBlock, weights: Weights, magnitudes: Weights
    ) -> Weights:
        """Parameters of the block, on fitted grids if their layer is quantized."""
        rounded = dict(weights)
        for name, weight in weights.items():
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and path in block.specs:
                spec, dtype = block.specs[path], self.context.dtype
                inputs = magnitudes.get(path, mx.ones(weight.shape[-1]))
                # An expert may have no inputs.
                costs = positive(inputs) ** 2
                costs = mx.broadcast_to(costs, (*weight.shape[:-2], weight.shape[-1]))
                matrices = weight.reshape(-1, *weight.shape[-2:])
                costs = costs.reshape(-1, weight.shape[-1])
                grids = (
                    fitted_rows(*each, spec, dtype).weight(dtype)
                    for each in zip(matrices, costs, strict=True)
                )
                rounded[name] = mx.concatenate([*grids]).reshape(weight.shape)
        return rounded


def power_scale(magnitudes: mx.array, power: float) -> mx.array:
    """Magnitudes [..., K] to a power, with the geometric mean 1."""
    logs = mx.log(positive(magnitudes))
    return mx.exp(power * (logs - logs.mean(axis=-1, keepdims=True)))


def _error(block: ScaledBlock, weights: Weights) -> float:
    """The squared error of the block's output with these weights."""
    original = block.module.parameters()
    block.module.update(tree_unflatten(list(weights.items())))
    total, left = 0.0, SEARCH_TOKENS
    for shard in block.shards:
        rows = slice(max(1, left // shard.tokens.shape[1]))
        output = block.run(shard.tokens[rows], shard.before[rows])
        errors = mx.where(shard.seen[rows, ..., None], output - shard.after[rows], 0)
        total += (errors * errors).sum().item()
        left -= output[..., 0].size
        if left <= 0:
            break
    block.module.update(original)
    return total


class Clipping(GPTQ):
    """RTN in clipped ranges, for the same inputs as GPTQ."""

    columns_at_once = K_BLOCK
    solve_rows = staticmethod(clip_rows)


# By `rounding`. Both go through the blocks in sequence, as GPTQ of little effort.
ROUNDINGS = {"rtn": Clipping, "gptq": GPTQ}


class AWQ:
    """Scales, then clipping and RTN, or GPTQ."""

    def __init__(self, config: AWQConfig, context: PTQContext):
        self.config, self.context = config, context

    def quantize(self) -> dict[str, mx.array]:
        """Quantize the layers in `context.specs`.

        Returns:
            Packed codes, scales and biases by name, and the scaled weights of layers
            that are not quantized.
        """
        config, context = self.config, self.context
        scales = find_scales(context, BlockError(config, context))
        context.logger.info(f"AWQ: {len(scales.places)} scales")
        scaled = {path for mapping, _ in scales.places for path in mapping.consumers}
        if others := context.specs.keys() - scaled:
            names = sorted({BLOCK_PREFIX.sub("", path) for path in others})
            context.logger.info(f"rounded without scales: {', '.join(names)}")
        folder = context.folder / f"awq-{config.rounding}"
        task = replace(scales.context(context), folder=folder)
        method = ROUNDINGS[config.rounding](config.as_gptq, task)
        tensors = SequentialPipeline.from_method(method).run()
        return tensors | scales.unquantized(context)
