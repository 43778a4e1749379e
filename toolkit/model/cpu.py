"""What quantized layers need to be fast on MLX's CPU backend.

`mx.quantized_matmul` costs there the same for every row, while expanding the weight
once and multiplying through the BLAS is nearly free per row. On a GPU MLX's own
kernels do this choice, so nothing here is used.
"""

import mlx.core as mx
import mlx.nn as nn

# From here on expanding wins (measured, 256 to 4096 wide layers of 2 to 8 bits).
MANY_ROWS = 4


def expand_many_rows(model: nn.Module) -> None:
    """Let the quantized linear layers of `model` choose by the number of rows."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = ExpandingLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = ExpandingEmbedding


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


class ExpandingLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` that expands its weight for many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] < MANY_ROWS:
            return super().__call__(x)
        y = _multiply(self, x)
        return y + self.bias if "bias" in self else y


class ExpandingEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` that expands its weight for many rows as a head."""

    def as_linear(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] < MANY_ROWS:
            return super().as_linear(x)
        return _multiply(self, x)
