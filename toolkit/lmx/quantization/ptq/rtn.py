"""Round-to-nearest weight quantization: MLX's own grids, no calibration."""

import mlx.core as mx

from ...config.quantize import RTNConfig
from ..packing import pack
from .base import PTQContext


def quantize(config: RTNConfig, task: PTQContext) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, computed when used."""
    # Of another model that nobody else holds, each weight is let go once it is written.
    model = task.reread() if task.reread else task.model
    modules = dict(model.named_modules())
    tensors = {}
    for path, spec in task.specs.items():
        packed = pack(modules[path].weight, spec, task.dtype)
        tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors
