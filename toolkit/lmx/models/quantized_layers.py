"""Quantized layers: their shapes and float32 weights, and quantized inputs.

In models whose config has `quantize_activations`, mlx-lm's linear layers are
`nn.QQLinear`: `mx.qqmm` rounds every group of an input to the grid of the weight's
mode, with a scale of its own, and multiplies. There is nothing to calibrate. MLX's CPU
backend computes it for one row only. `quantize_input` gives the bits that it rounds
inputs to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..config.quant_spec import ACTIVATION_MODES, FIXED_MODES
from ..cpu import on_cpu, quantized_matmul, replaces_functions
from . import global_scale
from .checkpoint import GRID_TENSORS
from .float_formats import MODES, straight_through
from .hooks import put_in_front

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


def quantize_input(x: mx.array, mode: str) -> mx.array:
    """The inputs [..., K] rounded to the grid of a mode, with the identity as gradient.

    Each group is divided by the scale that its largest magnitude needs, as `mx.qqmm`
    does. The result has the type of `x`, which holds every value exactly.

    Args:
        mode: "nvfp4" or "mxfp8"; K is a multiple of its group size.
    """
    return _rounding(mode)(x)


@cache
def _rounding(mode: str):
    assert mode in ACTIVATION_MODES, mode
    grid, (group_size, _) = MODES[mode], FIXED_MODES[mode]

    @mx.compile
    def nearest(x):
        groups = x.astype(mx.float32).reshape(-1, group_size)
        codes = grid.range_codes(mx.abs(groups).max(axis=-1))
        scales = grid.scales.values(codes)[:, None]
        elements = mx.where(scales == 0, 0.0, groups / scales)
        values = grid.elements.nearest(elements, grid.elements.max) * scales
        return values.reshape(x.shape).astype(x.dtype)

    return straight_through(nearest)


class QQLinear(nn.QQLinear):
    """`nn.QQLinear` on all devices, which keeps its codes in training mode.

    MLX's own layer dequantizes its codes there, and quantizes them again later. Here
    the input has a gradient in training mode; the weight has none.

    Attributes:
        quantizes_input: False = the inputs as they are, as in `nn.QuantizedLinear`.
    """

    quantizes_input = True

    def __call__(self, x: mx.array) -> mx.array:
        if self.quantizes_input and not self.training and not on_cpu():
            return super().__call__(x)
        if self.quantizes_input:
            x = quantize_input(x, self.mode)
        if replaces_functions():
            return quantized_matmul.multiply(self, x)
        grid = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
        return mx.quantized_matmul(x, self.weight, self.scales, **grid)

    def _set_training_mode(self, mode: bool) -> None:
        # Not that of `nn.QQLinear`.
        nn.Module._set_training_mode(self, mode)


def has_quantized_inputs(model: nn.Module) -> bool:
    """Whether the inputs of a layer of a loaded model are quantized."""
    return any(isinstance(module, QQLinear) for _, module in model.named_modules())


def replace_qq_layers(model: nn.Module) -> None:
    """Replace every `nn.QQLinear` by `QQLinear`, in place."""
    for _, module in model.named_modules():
        if type(module) is nn.QQLinear:
            module.__class__ = QQLinear


@contextmanager
def full_precision_inputs(model: nn.Module) -> Iterator[None]:
    """Let a model's layers multiply their inputs as they are, inside the context."""
    layers = [m for _, m in model.named_modules() if isinstance(m, QQLinear)]
    for layer in layers:
        layer.quantizes_input = False
    try:
        yield
    finally:
        for layer in layers:
            layer.quantizes_input = True


def fake_quantize_inputs(layer: nn.Module, mode: str | None) -> None:
    """Let a dense layer or its adapter round its inputs as the quantized layer will.

    Args:
        layer: `nn.Linear`, or an adapter of one; its class becomes a subclass.
        mode: of the layer's weight; None = the inputs as they are.
    """
    if not isinstance(layer, _FakeQuantizedInput):
        put_in_front(_FakeQuantizedInput, layer)
    layer.input_mode = mode


class _FakeQuantizedInput:
    """A class in front of a layer's, which rounds the inputs of calls."""

    def __call__(self, x: mx.array) -> mx.array:
        if self.input_mode is not None:
            x = quantize_input(x, self.input_mode)
        return super().__call__(x)
