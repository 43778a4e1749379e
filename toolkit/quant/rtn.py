"""Round-to-nearest weight quantization: MLX's own grids, no calibration."""

from typing import Literal

import mlx.core as mx

from .spec import pack
from .task import PostTraining, Task


class Config(PostTraining):
    """Round every weight to the nearest point of its group's grid."""

    method: Literal["rtn"] = "rtn"
    """The method's name."""


def quantize(config: Config, task: Task) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, as they are stored."""
    modules = dict(task.model.named_modules())
    tensors = {}
    for path, spec in task.specs.items():
        packed = pack(modules[path].weight, spec, task.dtype)
        mx.eval(packed)
        tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors
