"""Round-to-nearest weight quantization: MLX's own grids, no calibration."""

from typing import Literal

import mlx.core as mx
from pydantic import model_validator

from ..spec import pack
from ..task import PostTraining, Task


class Config(PostTraining):
    """Round every weight to the nearest point of its group's grid."""

    method: Literal["rtn"] = "rtn"
    """The method's name."""

    @model_validator(mode="after")
    def _scaled(self):
        if self.tune and self.mode != "affine":
            raise ValueError(f"{self.mode} has no scales to tune; leave `tune` out")
        return self


def quantize(config: Config, task: Task) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `task.specs`, computed when used."""
    # Of another model that nobody else holds, each weight is let go once it is written.
    model = task.reread() if task.reread else task.model
    modules = dict(model.named_modules())
    tensors = {}
    for path, spec in task.specs.items():
        packed = pack(modules[path].weight, spec, task.dtype)
        tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors
