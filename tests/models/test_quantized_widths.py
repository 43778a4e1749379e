"""Quantized layers of awkward widths, in generation and in training."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx import cpu

WIDTH = 128
GRIDS = [("affine", 2, 32), ("affine", 3, 64), ("affine", 4, 64), ("affine", 5, 64)]
GRIDS += [("affine", 6, 128), ("affine", 8, 32)]
GRIDS += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    ("outputs", "rows"), [(1, 3), (4, 40), (7, 1), (72, 3), (200, 40), (200, 1)]
)
def test_products_and_gradients_equal_dense_layers(grid, outputs, rows):
    """Kernels gave zeros or wrong sums if 64 does not divide the width, or below 8:
    mlx #4250, #3762."""
    mode, bits, group_size = grid
    options = {"group_size": group_size, "bits": bits, "mode": mode}
    layer = nn.Sequential(nn.QuantizedLinear(WIDTH, outputs, bias=False, **options))
    cpu.enable(layer)
    tensors = layer.layers[0]
    weight = mx.dequantize(
        tensors.weight, tensors.scales, tensors.get("biases"), **options
    ).astype(mx.float32)
    x, cotangent = (
        mx.random.normal((rows, size), key=mx.random.key(size))
        for size in (WIDTH, outputs)
    )
    [product], [gradient] = mx.vjp(layer, [x], [cotangent])
    assert mx.abs(product).max() > 0
    assert mx.allclose(product, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert mx.allclose(gradient, cotangent @ weight, rtol=1e-4, atol=1e-4)
