"""Faster functions and layers in place of MLX's on the CPU.

Functions: MLX's exponentials are slow on the CPU, and so are the activations and the
attention made of them.

Quantized layers: on the CPU, `mx.quantized_matmul` costs the same for every input row.
Dequantizing the weight costs once, after which a row is nearly free in the BLAS.
"""

import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .attention import attention
from .fast_exp import gelu_approx, silu, swiglu

# Input rows from which dequantizing is faster, by bits or by mode. Measured on one core
# with OpenBLAS: the same for layers of 256 to 2048, but different for each packing of
# the codes.
MIN_ROWS_AFFINE = {2: 3, 3: 6, 4: 2, 5: 8, 6: 10, 8: 2}
MIN_ROWS_FLOATING = {"mxfp4": 24, "nvfp4": 24, "mxfp8": 2}
# Queries from which blockwise attention is faster, and values from which `swiglu` is.
MIN_QUERIES, MIN_GATE_VALUES = 64, 1 << 14
MLX_LM_MODELS = "mlx_lm.models."

mlx_attention = mx.fast.scaled_dot_product_attention
"""MLX's own function, as it was before `replace_functions`."""


@cache
def replace_functions() -> None:
    """Replace MLX's silu, gelu and attention for all models of this process."""
    nn.silu, nn.gelu_approx = silu, gelu_approx
    mx.fast.scaled_dot_product_attention = _attention


def _attention(queries, keys, values, *, scale, mask=None, sinks=None, **options):
    """MLX's attention, blockwise for long float32 self-attention."""
    length = queries.shape[2]
    supported = sinks is None and (mask is None or isinstance(mask, str))
    if (
        supported
        and not options
        and MIN_QUERIES <= length == keys.shape[2]
        and queries.dtype == keys.dtype == values.dtype == mx.float32
    ):
        return attention(queries, keys, values, scale, causal=mask is not None)
    return mlx_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, **options
    )


def replace_swiglu() -> None:
    """Replace mlx-lm's `swiglu` for all its models of this process.

    Modules that are loaded hold the function by name. Modules loaded later import the
    replaced one.
    """
    activations = sys.modules.get(f"{MLX_LM_MODELS}activations")
    original = getattr(activations, "swiglu", None)
    if original is None or original.__module__ == __name__:
        return

    def replacement(gate, x):
        return (swiglu if gate.size >= MIN_GATE_VALUES else original)(gate, x)

    for name, module in list(sys.modules.items()):
        if (
            name.startswith(MLX_LM_MODELS)
            and getattr(module, "swiglu", None) is original
        ):
            module.swiglu = replacement


def dequantize_for_many_tokens(model: nn.Module) -> None:
    """Let the quantized layers of `model` dequantize their weights for large inputs."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = DequantizingLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = DequantizingEmbedding


def _is_worthwhile(layer: nn.Module, x: mx.array) -> bool:
    """Whether `x` has enough rows that dequantizing the weight is faster."""
    threshold = MIN_ROWS_FLOATING.get(layer.mode) or MIN_ROWS_AFFINE.get(layer.bits, 10)
    return x.size // x.shape[-1] >= threshold


def _multiply(layer: nn.Module, x: mx.array) -> mx.array:
    weight = mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        dtype=x.dtype,
    )
    return x @ weight.T


class DequantizingLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` that dequantizes its weight for many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_worthwhile(self, x):
            return super().__call__(x)
        y = _multiply(self, x)
        return y + self.bias if "bias" in self else y


class DequantizingEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` that, as a head, dequantizes its weight for many rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        if not _is_worthwhile(self, x):
            return super().as_linear(x)
        return _multiply(self, x)
