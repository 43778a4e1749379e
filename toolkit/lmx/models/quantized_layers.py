"""Shape and float32 weight of a layer, dense or quantized."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import global_scale
from .checkpoint import GRID_TENSORS

# Tensors of a quantized layer, without its bias.
TENSORS = ("weight", *GRID_TENSORS)


def is_quantized(layer: nn.Module) -> bool:
    """Whether the layer stores codes and scales."""
    return "scales" in layer and hasattr(layer, "group_size")


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape [..., out, in] of a layer's weight.

    From the scales: at 3, 5 and 6 bits no division of the packed width gives it.
    """
    if not is_quantized(layer):
        return tuple(layer.weight.shape)
    *rows, groups = layer.scales.shape
    return (*rows, groups * layer.group_size)


def dequantize(layer: nn.Module, tensors: dict[str, mx.array]) -> mx.array:
    """The float32 weight [..., out, in] of a layer, from its tensors by name."""
    if not is_quantized(layer):
        return tensors["weight"].astype(mx.float32)
    if (scale := tensors.get(global_scale.NAME)) is not None:
        return global_scale.dequantize(tensors["weight"], tensors["scales"], scale)
    return dequantize_groups(tensors, layer)


def dequantize_groups(tensors: dict[str, mx.array], grid: Any) -> mx.array:
    """The float32 weight [..., out, in] of codes, scales and biases by name.

    Args:
        grid: has `group_size`, `bits` and `mode`.
    """
    return mx.dequantize(
        tensors["weight"],
        _to_float32(tensors["scales"]),
        _to_float32(tensors.get("biases")),
        group_size=grid.group_size,
        bits=grid.bits,
        mode=grid.mode,
        dtype=mx.float32,
    )


def dequantized_weight(layer: nn.Module) -> mx.array:
    """`dequantize` of the layer's current tensors."""
    return dequantize(layer, dict(layer.items()))


def _to_float32(values: mx.array | None) -> mx.array | None:
    """Scales in float32; those of the floating-point modes are codes and stay."""
    if values is None or not mx.issubdtype(values.dtype, mx.floating):
        return values
    return values.astype(mx.float32)
