"""Post-training quantization methods by their name in a recipe, and RTN itself."""

import mlx.core as mx

from ...config.quantize import RTNConfig
from ..packing import pack
from .awq import AWQ
from .base import PTQContext
from .gptq.gptq import GPTQ


class RTN:
    """Round every weight to the nearest point of its group's grid."""

    def __init__(self, config: RTNConfig, context: PTQContext):
        self.context = context

    def quantize(self) -> dict[str, mx.array]:
        """Packed codes, scales and biases by name, computed when they are used."""
        context = self.context
        # Nothing else holds a reread model, so each weight is freed once it is written.
        model = context.reread() if context.reread else context.model
        modules = dict(model.named_modules())
        tensors = {}
        for path, spec in context.specs.items():
            packed = pack(modules[path].weight, spec, context.dtype)
            tensors |= {f"{path}.{name}": value for name, value in packed.items()}
        return tensors


# Called with the method's config and a `PTQContext`; `quantize()` returns the tensors.
METHODS = {"rtn": RTN, "gptq": GPTQ, "awq": AWQ}
