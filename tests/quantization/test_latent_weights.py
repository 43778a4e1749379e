"""Weights that begin within the cells of their codes, against NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.packing import expand, pack
from lmx.quantization.qat.quantizers import FixedScaleQuantizer, LSQQuantizer
from lmx.quantization.qat.ste import CELL_MARGIN

GROUP = 64
BITS = (2, 3, 4, 5, 6, 8)


def normal(*shape, seed=0, scale=0.05):
    return scale * mx.random.normal(shape, key=mx.random.key(seed))


def begun(module, bits, dtype, shape=(8, 256), distance=1.0):
    """A quantizer, what is stored, and weights some steps about the stored points."""
    spec = QuantSpec(bits=bits, group_size=GROUP)
    quantizer = module(spec, dtype, "mse")
    packed = pack(normal(*shape), spec, dtype)
    width = mx.abs(mx.repeat(packed["scales"], GROUP, axis=-1)).astype(mx.float32)
    points = expand(packed, spec, mx.float32)
    return (
        quantizer,
        packed,
        points,
        points + distance * width * normal(*shape, scale=1),
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "module", [LSQQuantizer, FixedScaleQuantizer], ids=["lsq", "fixed_scale"]
)
def test_latent_weights_keep_codes_and_gradients(module, bits, dtype):
    quantizer, packed, _, wished = begun(module, bits, dtype, shape=(2, 4, 256))
    weight = quantizer.latent_within_cell(packed, wished)
    qparams = quantizer.init_from_codes(packed)
    assert weight.dtype == mx.float32
    assert weight.shape == wished.shape
    stored = quantizer.pack(weight, qparams)
    assert all(mx.array_equal(stored[name], packed[name]) for name in packed)
    # Control: as wished for, they would have others.
    other = quantizer.pack(wished, qparams)
    assert not mx.array_equal(other["weight"], packed["weight"])
    slope = mx.grad(lambda w: quantizer.fake_quantize(w, qparams).sum())(weight)
    assert mx.array_equal(slope, mx.ones_like(slope))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "module", [LSQQuantizer, FixedScaleQuantizer], ids=["lsq", "fixed_scale"]
)
def test_latent_weights_are_nearest_to_the_target_within_their_cell(module, bits):
    quantizer, packed, points, wished = begun(module, bits, mx.float32, distance=0.4)
    scales, biases = (
        np.repeat(np.array(packed[name], np.float64), GROUP, axis=-1)
        for name in ("scales", "biases")
    )
    codes = np.round((np.array(points, np.float64) - biases) / scales)
    steps = (np.array(wished, np.float64) - biases) / scales
    most, margin, top = 0.5 - CELL_MARGIN, module.CLIP_MARGIN, 2**bits - 1
    nearest = np.clip(steps, codes - most, codes + most)
    nearest = np.clip(nearest, CELL_MARGIN - margin, top + margin - CELL_MARGIN)
    found = (
        np.array(quantizer.latent_within_cell(packed, wished), np.float64) - biases
    ) / scales
    assert np.abs(found - nearest).max() < 1e-3
    # Most wishes lie within, and are fulfilled; some do not.
    assert 0.5 < (np.abs(found - steps) < 1e-3).mean() < 0.95


@pytest.mark.parametrize("scale", [0.0, 1e-9], ids=["of one value", "hidden"])
def test_latent_weights_start_at_the_level_where_float32_cannot_resolve_steps(scale):
    spec = QuantSpec(bits=4, group_size=GROUP)
    quantizer = LSQQuantizer(spec, mx.float32, "mse")
    codes = pack(normal(4, GROUP), spec, mx.float32)["weight"]
    scales, biases = mx.full((4, 1), scale), mx.full((4, 1), 1.0)
    packed = {"weight": codes, "scales": scales, "biases": biases}
    weight = quantizer.latent_within_cell(packed, normal(4, GROUP))
    assert mx.array_equal(weight, mx.ones_like(weight))
