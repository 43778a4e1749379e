"""Latent weights within the cells of their codes, compared with NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.bit_packing import unpack_codes
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.quantizers import FixedScaleQuantizer, LSQQuantizer
from quantization_samples import normal

GROUP = 64
BITS = (2, 3, 5, 8)
KEY = mx.random.key(7)


def packed_layer(quantizer_class, bits, dtype, shape=(8, 256)):
    """Return a quantizer, packed tensors and their levels."""
    spec = QuantSpec(bits=bits, group_size=GROUP)
    packed = pack(normal(*shape), spec, dtype)
    levels = dequantize(packed, spec, mx.float32)
    return quantizer_class(spec, dtype), packed, levels


def positions(weight, packed):
    """(weight - bias) / scale in float64."""
    scales, biases = (
        np.repeat(np.array(packed[name].astype(mx.float32), np.float64), GROUP, axis=-1)
        for name in ("scales", "biases")
    )
    return (np.array(weight, np.float64) - biases) / scales


EACH_QUANTIZER = pytest.mark.parametrize(
    "quantizer_class", [LSQQuantizer, FixedScaleQuantizer], ids=["lsq", "fixed_scale"]
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@EACH_QUANTIZER
def test_latent_weights_keep_codes_and_gradients(quantizer_class, bits, dtype):
    shape = (2, 4, 256)
    quantizer, packed, levels = packed_layer(quantizer_class, bits, dtype, shape)
    weight = quantizer.latent_within_cell(packed, KEY)
    qparams = quantizer.init_from_codes(packed)
    assert weight.dtype == mx.float32
    assert weight.shape == shape
    stored = quantizer.pack(weight, qparams)
    assert all(mx.array_equal(stored[name], packed[name]) for name in packed)
    # Negative control: weights twice as far from their levels have other codes.
    further = quantizer.pack(2 * weight - levels, qparams)
    assert not mx.array_equal(further["weight"], packed["weight"])
    gradient = mx.grad(lambda w: quantizer.fake_quantize(w, qparams).sum())(weight)
    assert mx.array_equal(gradient, mx.ones_like(gradient))


@pytest.mark.parametrize("place", [0.0, 1.0], ids=["low", "high"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@EACH_QUANTIZER
def test_latent_weights_at_the_ends_of_their_cells_keep_codes(
    monkeypatch, quantizer_class, bits, dtype, place
):
    """Random places come close to the ends, so rounding must leave the code there."""
    monkeypatch.setattr(mx.random, "uniform", lambda shape, key: mx.full(shape, place))
    quantizer, packed, *_ = packed_layer(quantizer_class, bits, dtype)
    # Up to 40 times as large as all steps together.
    packed["biases"] *= mx.linspace(-40, 40, 8)[:, None].astype(dtype)
    weight = quantizer.latent_within_cell(packed, KEY)
    stored = quantizer.pack(weight, quantizer.init_from_codes(packed))
    assert mx.array_equal(stored["weight"], packed["weight"])
    places = positions(weight, packed) - np.array(unpack_codes(packed["weight"], bits))
    assert np.abs(np.abs(places) - 0.5).min() < 0.001
    # The outermost cells of LSQ end at the outermost levels.
    assert (np.abs(places) > 0.49).mean() > 0.4


@EACH_QUANTIZER
def test_latent_weights_are_spread_evenly_by_key(quantizer_class):
    quantizer, packed, _ = packed_layer(quantizer_class, 4, mx.float32, (64, 1024))
    weight = quantizer.latent_within_cell(packed, KEY)
    codes = np.array(unpack_codes(packed["weight"], 4), np.float64)
    places = (positions(weight, packed) - codes)[(codes > 0) & (codes < 15)]
    shares = np.histogram(places, bins=10, range=(-0.5, 0.5))[0] / len(places)
    assert len(places) > 10_000
    assert np.abs(shares - 0.1).max() < 0.01
    assert mx.array_equal(quantizer.latent_within_cell(packed, KEY), weight)
    other = quantizer.latent_within_cell(packed, mx.random.key(8))
    assert (other != weight).mean().item() > 0.9


@EACH_QUANTIZER
def test_quantized_weights_follow_small_updates_on_average(quantizer_class):
    """An update by 0.4 % of a step changes 0.4 % of the codes by a step."""
    shape = (512, 1024)
    quantizer, packed, levels = packed_layer(quantizer_class, 4, mx.float32, shape)
    qparams = quantizer.init_from_codes(packed)
    step = mx.repeat(mx.abs(packed["scales"]), GROUP, axis=-1)
    sign = mx.where(normal(*shape, seed=3) < 0, -1.0, 1.0)
    position = (levels - mx.repeat(packed["biases"], GROUP, axis=-1)) / step
    inner = (mx.abs(position) > 0.5) & (mx.abs(position) < 14.5)

    def moved(weight):
        """Steps that the quantized weights move, on average."""
        updated = quantizer.fake_quantize(weight + 0.004 * sign * step, qparams)
        steps = (updated - levels) * sign / step
        return (mx.where(inner, steps, 0.0).sum() / inner.sum()).item()

    weight = quantizer.latent_within_cell(packed, KEY)
    assert mx.array_equal(quantizer.fake_quantize(weight, qparams), levels)
    assert moved(weight) == pytest.approx(0.004, rel=0.15)
    # Negative control: from the dequantized codes, no weight moves.
    assert moved(levels) == 0


@pytest.mark.parametrize("scale", [0.0, 1e-9], ids=["constant", "hidden"])
def test_latent_weights_start_at_the_level_where_float32_cannot_resolve_steps(scale):
    spec = QuantSpec(bits=4, group_size=GROUP)
    quantizer = LSQQuantizer(spec, mx.float32)
    codes = pack(normal(4, GROUP), spec, mx.float32)["weight"]
    scales, biases = mx.full((4, 1), scale), mx.full((4, 1), 1.0)
    packed = {"weight": codes, "scales": scales, "biases": biases}
    weight = quantizer.latent_within_cell(packed, KEY)
    assert mx.array_equal(weight, mx.ones_like(weight))
