"""What models need to be fast on MLX's CPU backend.

Functions: MLX's exponentials are slow there, and so is all that is made of them.

Quantized layers: `mx.quantized_matmul` costs there the same for every row, while
expanding the weight costs once, and rows are nearly free in the BLAS. On a GPU MLX's
own kernels are fast and do this choice, so nothing here is used.
"""

import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .attention import attention
from .fast_exp import gelu_approx, silu, swiglu

# Rows from which expanding is faster. Measured on one core with OpenBLAS, layers of
# 256 to 2048: the same for all widths, but expanding costs what the codes make it cost.
AFFINE_ROWS = {2: 3, 3: 6, 4: 2, 5: 8, 6: 10, 8: 2}
FLOATING_ROWS = {"mxfp4": 24, "nvfp4": 24, "mxfp8": 2}


# Queries from which attention by blocks is faster, and numbers from which `swiglu` is.
MANY_QUERIES, MANY_GATES = 64, 1 << 14
ZOO = "mlx_lm.models."
ACTIVATIONS = f"{ZOO}activations"


def on_cpu() -> bool:
    """Whether models run on the CPU here."""
    return mx.default_device() == mx.Device(mx.cpu)


@cache
def replace_slow_functions() -> None:
    """Put faster ones in MLX's place, for all models of this process."""
    nn.silu, nn.gelu_approx = silu, gelu_approx
    own = mx.fast.scaled_dot_product_attention

    def attend(queries, keys, values, *, scale, mask=None, sinks=None, **more):
        length = queries.shape[2]
        plain = sinks is None and (mask is None or isinstance(mask, str))
        if (
            plain
            and not more
            and MANY_QUERIES <= length == keys.shape[2]
            and queries.dtype == keys.dtype == values.dtype == mx.float32
        ):
            return attention(queries, keys, values, scale, causal=mask is not None)
        more |= {"scale": scale, "mask": mask, "sinks": sinks}
        return own(queries, keys, values, **more)

    mx.fast.scaled_dot_product_attention = attend


def replace_swiglu() -> None:
    """Put a faster one in the place of mlx-lm's, for all its models of this process.

    Those loaded have it by name; others will take it from where it was.
    """
    own = getattr(sys.modules.get(ACTIVATIONS), "swiglu", None)
    if own is None or own.__module__ == __name__:
        return

    def gated(gate, x):
        return (swiglu if gate.size >= MANY_GATES else own)(gate, x)

    for name, module in list(sys.modules.items()):
        if name.startswith(ZOO) and getattr(module, "swiglu", None) is own:
            module.swiglu = gated


def dequantize_many_rows(model: nn.Module) -> None:
    """Let the quantized linear layers of `model` choose by the number of rows."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = DequantizingLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = DequantizingEmbedding


def _pays(layer: nn.Module, x: mx.array) -> bool:
    """Whether `x` has rows enough to expand the layer's weight for them."""
    few = FLOATING_ROWS.get(layer.mode) or AFFINE_ROWS.get(layer.bits, 10)
    return x.size // x.shape[-1] >= few


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
    """`nn.QuantizedLinear` that expands its weight for many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _pays(self, x):
            return super().__call__(x)
        y = _multiply(self, x)
        return y + self.bias if "bias" in self else y


class DequantizingEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` that expands its weight for many rows as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        if not _pays(self, x):
            return super().as_linear(x)
        return _multiply(self, x)
