"""Round-to-nearest weight quantization: MLX's own grids, no calibration."""

from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from .spec import Quantization, QuantSpec, pack


class Config(Quantization):
    """Round every weight to the nearest point of its group's grid."""

    method: Literal["rtn"] = "rtn"
    """The method's name."""


def quantize(
    model: nn.Module, specs: dict[str, QuantSpec], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Codes, scales and biases of the layers in `specs`, as a checkpoint stores them.

    Args:
        dtype: the type the checkpoint stores.
    """
    modules = dict(model.named_modules())
    tensors = {}
    for path, spec in specs.items():
        packed = pack(modules[path].weight, spec, dtype)
        mx.eval(packed)
        tensors |= {f"{path}.{name}": value for name, value in packed.items()}
    return tensors
