"""Latent weights within the cells of their codes, compared with NumPy."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.quantization.bit_packing import unpack_codes
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.quantizers import (
    FixedCodesQuantizer,
    FixedScaleQuantizer,
    LSQQuantizer,
)
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_fixed_codes_begin_as_stored_and_have_the_gradients_of_the_levels(bits, dtype):
    quantizer, packed, _ = packed_layer(FixedCodesQuantizer, bits, dtype)
    codes = unpack_codes(packed["weight"], bits).astype(mx.uint8)
    qparams = quantizer.init_from_codes(packed)
    stored = quantizer.pack(codes, qparams)
    assert all(mx.array_equal(stored[name], packed[name]) for name in packed)
    exact = quantizer.fake_quantize(codes, qparams)
    assert mx.array_equal(exact, dequantize(packed, quantizer._spec, dtype))

    cotangent, top = normal(*codes.shape), 2**bits - 1
    gradients = mx.grad(
        lambda q: (cotangent * quantizer.fake_quantize(codes, q)).sum()
    )(qparams)
    grouped, codes = (x.reshape(len(codes), -1, GROUP) for x in (cotangent, codes))
    factor = 1 / np.sqrt(GROUP * top)
    expected = {
        # The scale moves about the middle of the codes.
        "spreads": factor * (grouped * (codes - top / 2)).sum(axis=-1).reshape(-1),
        "shifts": factor * grouped.sum(axis=-1).reshape(-1),
    }
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, rtol=1e-4, atol=1e-4 * top)


def test_weights_on_their_levels_give_a_scale_no_gradient_unless_codes_are_fixed():
    """Why training of scales alone has a quantizer of its own."""
    found = {}
    for quantizer_class in (LSQQuantizer, FixedCodesQuantizer):
        quantizer, packed, levels = packed_layer(quantizer_class, 2, mx.float32)
        codes = unpack_codes(packed["weight"], 2).astype(mx.uint8)
        weight = codes if quantizer_class is FixedCodesQuantizer else levels
        qparams = quantizer.init_from_codes(packed)
        gradients = mx.grad(
            lambda q, f=quantizer, w=weight: (f.fake_quantize(w, q) ** 2).sum()
        )
        [scales, *_] = gradients(qparams).values()
        found[quantizer_class] = mx.abs(scales).mean().item()
    # Rounding leaves some weights just outside of the range.
    assert found[LSQQuantizer] < 0.2 * found[FixedCodesQuantizer]


def test_scales_of_fixed_codes_spread_about_the_middle():
    quantizer, packed, _ = packed_layer(FixedCodesQuantizer, 2, mx.float32)
    start = quantizer.init_from_codes(packed)
    wide, shape = start | {"spreads": packed["scales"].reshape(-1)}, (8, 256)
    low, high, wide_low, wide_high = (
        np.array(quantizer.fake_quantize(mx.full(shape, code), qparams))
        for qparams in (start, wide)
        for code in (0, 3)
    )
    np.testing.assert_allclose(low + high, wide_low + wide_high, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(wide_high - wide_low, 2 * (high - low), rtol=1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_an_update_of_a_grid_has_the_same_size_for_all_bits(bits):
    """The middle level moves by mean scales, the outermost ones twice as far."""
    quantizer, packed, _ = packed_layer(FixedCodesQuantizer, bits, mx.float32)
    start, rates = quantizer.init_from_codes(packed), quantizer.lr_multipliers()
    scale = mx.abs(packed["scales"]).mean().item()
    top, shape = 2**bits - 1, (8, 256)

    def moved(name, code):
        """How far a level moves if a parameter moves by its learning rate."""
        after = start | {name: start[name] + rates[name]}
        levels = [
            quantizer.fake_quantize(mx.full(shape, code), q) for q in (start, after)
        ]
        return (levels[1] - levels[0]).mean().item() / scale

    for code in (0, top):
        assert moved("shifts", code) == pytest.approx(5.0, rel=1e-3)
    assert moved("spreads", top) == pytest.approx(10.0, rel=1e-3)
    assert moved("spreads", 0) == pytest.approx(-10.0, rel=1e-3)
