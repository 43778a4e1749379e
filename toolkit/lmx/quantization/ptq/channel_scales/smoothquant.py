"""SmoothQuant (arXiv 2211.10438): move the range of activations into weights.

A few channels of a layer's inputs are much larger than the others of their group, and
the quantized inputs lose the others. Each channel of the inputs is divided by a scale,
and the weights of the layer are multiplied by it (equation 4 of the paper).
"""

import mlx.core as mx
import mlx.nn as nn

from ....config.quantize import PTQConfig
from ....errors import UserError
from ..base import PTQContext, Weights
from .channel_scales import (
    ChannelScales,
    ScaledBlock,
    ScaleObjective,
    find_scales,
    positive,
)
from .scale_mappings import ScaleMapping

# Tokens that the largest inputs are taken from, if the recipe gives no number.
NUM_TOKENS = 1 << 13
HINT = "remove smoothing_strength"


class SmoothQuant(ScaleObjective):
    """Scales by the ranges of inputs and weights."""

    name, hint = "smoothquant", HINT

    def __init__(self, config: PTQConfig):
        self.strength = config.smoothing
        self.key = (self.strength,)
        self.num_tokens = config.calibration.num_tokens or NUM_TOKENS

    def measured_layer(
        self, mapping: ScaleMapping, layers: dict[str, nn.Module]
    ) -> str | None:
        # Inputs of experts are not quantized. Values that heads share are left alone:
        # no measurement has them.
        linear = [p for p, module in layers.items() if isinstance(module, nn.Linear)]
        return linear[0] if linear and mapping.repeats == 1 else None

    def magnitude(self, rows: mx.array) -> mx.array:
        # The maximum over all tokens, as in the paper, grows with the number of tokens
        # until single tokens decide.
        return rows.max(axis=1).sum(axis=0)

    def scale(
        self, block: ScaledBlock, mapping: ScaleMapping, path: str, weights: Weights
    ) -> mx.array:
        columns = []
        for name in filter(block.specs.__contains__, mapping.consumers):
            weight = mx.abs(weights[f"{name}.weight"])
            columns.append(weight.reshape(-1, weight.shape[-1]).max(axis=0))
        largest = mx.stack(columns).max(axis=0)
        return smoothing_scale(block.magnitudes[path], largest, self.strength)


def smooth(context: PTQContext, config: PTQConfig) -> ChannelScales:
    """Find SmoothQuant's scales.

    Args:
        context: its `reread` is not None.
        config: its `smoothing` is not 0.

    Returns:
        No places if the model cannot be smoothed and the recipe does not name
        `smoothing_strength`.

    Raises:
        UserError: the recipe names it, and the model is not a plain sequence of blocks,
            or has no place for a scale in front of a layer whose inputs are quantized.
    """
    try:
        scales = find_scales(context, SmoothQuant(config))
        if not scales.places:
            raise UserError(
                "no norm or linear layer of this model can take the scales of "
                "smoothing_strength",
                hint=HINT,
            )
    except UserError as error:
        if config.smoothing_strength is not None:
            raise
        context.logger.info(f"SmoothQuant is not used: {error.message}")
        return ChannelScales([])
    count = len(scales.places)
    context.logger.info(f"smoothing_strength {config.smoothing:g}: {count} scales")
    return scales


def smoothing_scale(inputs: mx.array, weights: mx.array, strength: float) -> mx.array:
    """Equation 4 of the paper, with the geometric mean that strength 0.5 gives.

    Weights and inputs then have the same range at any strength. The scales of nvfp4
    lose precision below 2 ** -6, so neither may be small.

    Args:
        inputs, weights: magnitudes [K] of a layer's input channels, and of the columns
            of the layers that share this input.
    """
    inputs, weights = mx.log(positive(inputs)), mx.log(positive(weights))
    scale = strength * inputs - (1 - strength) * weights
    return mx.exp(scale - scale.mean() + (inputs - weights).mean() / 2)
