"""Latent weights within the cells of their codes, compared with NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.quantizers import FixedScaleQuantizer, LSQQuantizer
from lmx.quantization.qat.ste import CELL_MARGIN

GROUP = 64
BITS = (2, 3, 4, 5, 6, 8)


def normal(*shape, seed=0, scale=0.05):
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def packed_layer(quantizer_class, bits, dtype, shape=(8, 256), distance=1.0):
    """Return a quantizer, packed tensors, their levels and shifted targets."""
    spec = QuantSpec(bits=bits, group_size=GROUP)
    quantizer = quantizer_class(spec, dtype, "mse")
    packed = pack(normal(*shape), spec, dtype)
    width = mx.abs(mx.repeat(packed["scales"], GROUP, axis=-1)).astype(mx.float32)
    levels = dequantize(packed, spec, mx.float32)
    return (
        quantizer,
        packed,
        levels,
        levels + distance * width * normal(*shape, scale=1),
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "quantizer_class", [LSQQuantizer, FixedScaleQuantizer], ids=["lsq", "fixed_scale"]
)
def test_latent_weights_keep_codes_and_gradients(quantizer_class, bits, dtype):
    quantizer, packed, _, target = packed_layer(
        quantizer_class, bits, dtype, shape=(2, 4, 256)
    )
    weight = quantizer.latent_within_cell(packed, target)
    qparams = quantizer.init_from_codes(packed)
    assert weight.dtype == mx.float32
    assert weight.shape == target.shape
    stored = quantizer.pack(weight, qparams)
    assert all(mx.array_equal(stored[name], packed[name]) for name in packed)
    # Negative control: the targets have other codes.
    packed_target = quantizer.pack(target, qparams)
    assert not mx.array_equal(packed_target["weight"], packed["weight"])
    gradient = mx.grad(lambda w: quantizer.fake_quantize(w, qparams).sum())(weight)
    assert mx.array_equal(gradient, mx.ones_like(gradient))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "quantizer_class", [LSQQuantizer, FixedScaleQuantizer], ids=["lsq", "fixed_scale"]
)
def test_latent_weights_are_nearest_to_the_target_within_their_cell(
    quantizer_class, bits
):
    quantizer, packed, levels, target = packed_layer(
        quantizer_class, bits, mx.float32, distance=0.4
    )
    scales, biases = (
        np.repeat(np.array(packed[name], np.float64), GROUP, axis=-1)
        for name in ("scales", "biases")
    )
    codes = np.round((np.array(levels, np.float64) - biases) / scales)
    steps = (np.array(target, np.float64) - biases) / scales
    reach, margin, top = 0.5 - CELL_MARGIN, quantizer_class.CLIP_MARGIN, 2**bits - 1
    nearest = np.clip(steps, codes - reach, codes + reach)
    nearest = np.clip(nearest, CELL_MARGIN - margin, top + margin - CELL_MARGIN)
    actual = (
        np.array(quantizer.latent_within_cell(packed, target), np.float64) - biases
    ) / scales
    assert np.abs(actual - nearest).max() < 1e-3
    # Most targets are within their cell.
    assert 0.5 < (np.abs(actual - steps) < 1e-3).mean() < 0.95


@pytest.mark.parametrize("scale", [0.0, 1e-9], ids=["constant", "hidden"])
def test_latent_weights_start_at_the_level_where_float32_cannot_resolve_steps(scale):
    spec = QuantSpec(bits=4, group_size=GROUP)
    quantizer = LSQQuantizer(spec, mx.float32, "mse")
    codes = pack(normal(4, GROUP), spec, mx.float32)["weight"]
    scales, biases = mx.full((4, 1), scale), mx.full((4, 1), 1.0)
    packed = {"weight": codes, "scales": scales, "biases": biases}
    weight = quantizer.latent_within_cell(packed, normal(4, GROUP))
    assert mx.array_equal(weight, mx.ones_like(weight))
