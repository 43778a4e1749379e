"""AWQ (arXiv 2306.00978): scales in front of layers, then ranges that are clipped."""

from dataclasses import replace

import mlx.core as mx

from ...config.quant_spec import K_BLOCK
from ...config.quantize import AWQConfig
from ..target_layers import BLOCK_PREFIX
from .base import PTQContext
from .channel_scales.channel_scales import AWQScales, find_scales
from .gptq.clipping import clip_rows
from .gptq.gptq import GPTQ
from .sequential import SequentialPipeline


class Clipping(GPTQ):
    """RTN in clipped ranges, for the same inputs as GPTQ."""

    columns_at_once = K_BLOCK
    solve_rows = staticmethod(clip_rows)


# By `rounding`.
ROUNDINGS = {"rtn": Clipping, "gptq": GPTQ}


class AWQ:
    """Scale the channels with large inputs, then clip and round."""

    def __init__(self, config: AWQConfig, context: PTQContext):
        self.config, self.context = config, context

    def quantize(self) -> dict[str, mx.array]:
        """Quantize the layers in `context.specs`.

        Returns:
            Packed codes, scales and biases by name, and the scaled weights of layers
            that are not quantized.
        """
        config, context = self.config, self.context
        scales = find_scales(context, AWQScales(context), config)
        context.logger.info(f"AWQ: {len(scales.places)} scales")
        scaled = {path for mapping, _ in scales.places for path in mapping.consumers}
        if others := context.specs.keys() - scaled:
            names = sorted({BLOCK_PREFIX.sub("", path) for path in others})
            context.logger.info(f"rounded without scales: {', '.join(names)}")
        # The same tokens and settings may have given other results.
        folder = context.folder / f"awq-{config.rounding}"
        task = replace(scales.context(context), folder=folder)
        method = ROUNDINGS[config.rounding](config.as_gptq, task)
        tensors = SequentialPipeline.from_method(method).run()
        return tensors | scales.unquantized(context)
