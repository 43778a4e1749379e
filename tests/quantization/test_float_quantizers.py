"""Fixed block scales in QAT, compared with float64 references, and stored tensors."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.qat import QATConfig
from lmx.config.quant_spec import QuantSpec
from lmx.models.float_formats import MODES, E4M3Scales
from lmx.quantization.packing import dequantize, pack
from lmx.quantization.qat.quantizers import (
    FixedBlockScaleQuantizer,
    MinMaxQuantizer,
    make_quantizer,
)
from quantization_samples import normal
from test_float_grid import FORMATS, numbers

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
KEY = mx.random.key(7)
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def quantizer_of(mode, dtype=mx.float32):
    config = QATConfig(mode=mode)
    return make_quantizer(config, QuantSpec(mode=mode), dtype)


def exact_levels(weight, packed, mode):
    """The nearest multiple of the stored scale by an element, in float64."""
    spec = QuantSpec(mode=mode)
    codes = np.array(packed["scales"]).astype(np.int64)
    # E8M0 is a power of two.
    if MODES[mode].scales is E4M3Scales:
        scales = numbers(8, 4)[codes]
    else:
        scales = 2.0 ** (codes - 127)
    scales = np.repeat(scales, spec.group_size, axis=-1)
    elements = np.unique(FORMATS[MODES[mode].elements])
    positions = np.array(weight, np.float64) / scales
    nearest = np.abs(positions[..., None] - elements).argmin(axis=-1)
    return elements[nearest] * scales


def squared_error(weight, packed, mode):
    spec = QuantSpec(mode=mode)
    served = np.array(dequantize(packed, spec, mx.float32), np.float64)
    return ((served - np.array(weight, np.float64)) ** 2).sum()


@pytest.mark.parametrize("shape", [(6, 96), (2, 3, 160)], ids=["matrix", "experts"])
@EACH_MODE
def test_weights_are_the_nearest_levels(mode, shape):
    """For moved weights too, also beyond the range; 96 and 160 are no multiples of
    64."""
    quantizer, weight = quantizer_of(mode), normal(*shape)
    assert isinstance(quantizer, FixedBlockScaleQuantizer)
    assert quantizer.init(weight) == {}
    before = quantizer.pack(weight, {})
    for value in (weight, weight + normal(*shape, seed=1), 4 * weight):
        packed = quantizer.pack(value, {})
        assert mx.array_equal(packed["scales"], before["scales"])
        served = np.array(dequantize(packed, QuantSpec(mode=mode), mx.float32))
        expected = exact_levels(value, packed, mode)
        np.testing.assert_allclose(served, expected, rtol=1e-6, atol=1e-7)
        forward = quantizer.fake_quantize(value, {})
        assert np.array_equal(np.array(forward), served)
    assert not mx.array_equal(before["weight"], packed["weight"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH_MODE
def test_forward_weights_are_the_exported_ones_bit_for_bit(mode, dtype):
    """Compiled, with zero groups, and with a NaN, which stays visible."""
    weight = normal(8, 96)
    weight[0] = 0
    weight[1, :64] *= 1e-6
    weight[2] *= 1e4
    quantizer, spec = quantizer_of(mode, dtype), QuantSpec(mode=mode)
    quantizer.init(weight.astype(dtype))
    moved = weight * (1 + normal(8, 96, seed=2))
    moved[3, 5] = mx.nan
    forward = mx.compile(lambda w: quantizer.fake_quantize(w, {}))(moved)
    served = dequantize(quantizer.pack(moved, {}), spec, dtype)
    assert served.dtype == dtype
    assert mx.array_equal(forward, served.astype(mx.float32), equal_nan=True)
    is_finite = np.isfinite(np.array(forward))
    assert not is_finite[3, 5]
    is_finite[3, : spec.group_size] = True
    assert is_finite.all()
    assert (np.array(forward)[0] == 0).all()


@EACH_MODE
def test_gradient_is_the_identity(mode):
    quantizer, weight = quantizer_of(mode), normal(4, 64)
    quantizer.init(weight)
    probe = normal(4, 64, seed=3)
    gradient = mx.grad(lambda w: (quantizer.fake_quantize(w, {}) * probe).sum())
    # Beyond the range too.
    for value in (weight, 8 * weight):
        assert mx.array_equal(gradient(value), probe)


@EACH_MODE
def test_least_squares_scales_have_less_error_than_those_of_the_range(mode):
    weight = normal(64, 256)
    quantizer = quantizer_of(mode)
    quantizer.init(weight)
    error = squared_error(weight, quantizer.pack(weight, {}), mode)
    rtn = squared_error(weight, pack(weight, QuantSpec(mode=mode), mx.float32), mode)
    # Elements of 8 bits are as fine for twice the scale.
    assert error <= (1.0 if mode == "mxfp8" else 0.95) * rtn


def test_large_weights_are_fitted_in_parts(monkeypatch):
    from lmx.quantization.qat import quantizers

    weight, whole, parts = normal(2, 7, 64), *(quantizer_of("nvfp4") for _ in "12")
    whole.init(weight)
    monkeypatch.setattr(quantizers, "CHUNK_WEIGHTS", 200)
    parts.init(weight)
    expected, actual = (q.pack(weight, {})["scales"] for q in (whole, parts))
    assert mx.array_equal(expected, actual)


def stored(mode, shape=(16, 96)):
    """RTN tensors of a checkpoint, and their float32 levels."""
    spec = QuantSpec(mode=mode)
    packed = pack(normal(*shape), spec, mx.float16)
    return packed, dequantize(packed, spec, mx.float32)


@pytest.mark.parametrize("place", [None, 0.0, 1.0], ids=["random", "low", "high"])
@EACH_MODE
def test_latent_weights_keep_the_codes(mode, place, monkeypatch):
    """At the ends of their cells too, where rounding must not leave them."""
    quantizer, (packed, levels) = quantizer_of(mode, mx.float16), stored(mode)
    if place is not None:
        monkeypatch.setattr(
            mx.random, "uniform", lambda shape, key: mx.full(shape, place)
        )
    latent = quantizer.latent_within_cell(packed, KEY)
    assert latent.dtype == mx.float32
    again = quantizer.pack(latent, quantizer.init_from_codes(packed))
    assert mx.array_equal(again["scales"], packed["scales"])
    spec = QuantSpec(mode=mode)
    assert mx.array_equal(dequantize(again, spec, mx.float32), levels)
    assert (latent != levels).mean().item() > 0.9
    # Negative control: weights further out have other codes.
    further = quantizer.pack(2.2 * latent - 1.2 * levels, {})
    assert not mx.array_equal(dequantize(further, spec, mx.float32), levels)


@EACH_MODE
def test_latent_weights_reach_halfway_to_both_neighbors(mode):
    packed, levels = stored(mode, (128, 1024))
    quantizer, spec = quantizer_of(mode), QuantSpec(mode=mode)
    latent = np.array(quantizer.latent_within_cell(packed, KEY), np.float64)
    scales = np.array(MODES[mode].scales.values(packed["scales"]), np.float64)
    scales = np.repeat(scales, spec.group_size, axis=-1)
    elements = np.unique(FORMATS[MODES[mode].elements])
    ends = (elements[1:] + elements[:-1]) / 2
    ends = np.concatenate([[-2 * elements[-1] - ends[0]], ends, [2 * elements[-1]]])
    ends[0], ends[-1] = 2 * elements[0] - ends[1], 2 * elements[-1] - ends[-2]
    index = np.searchsorted(elements, np.array(levels, np.float64) / scales)
    shares = (latent / scales - ends[index]) / (ends[index + 1] - ends[index])
    histogram = np.histogram(shares, bins=8, range=(0, 1))[0] / shares.size
    assert np.abs(histogram - 1 / 8).max() < 0.01
    other = quantizer.latent_within_cell(packed, mx.random.key(8))
    assert (np.array(other) != latent).mean() > 0.9


@EACH_MODE
def test_zero_scales_keep_their_zeros(mode):
    packed, _ = stored(mode)
    packed["scales"] = mx.zeros_like(packed["scales"])
    packed["weight"] = mx.zeros_like(packed["weight"])
    quantizer, spec = quantizer_of(mode), QuantSpec(mode=mode)
    latent = quantizer.latent_within_cell(packed, KEY)
    again = quantizer.pack(latent, {})
    assert all(mx.array_equal(again[name], packed[name]) for name in packed)
    assert mx.array_equal(dequantize(again, spec, mx.float16), mx.zeros((16, 96)))


@pytest.mark.parametrize(
    ("qat", "spec", "expected"),
    [
        ({}, {"mode": "nvfp4"}, FixedBlockScaleQuantizer),
        ({"mode": "nvfp4", "quantizer": "minmax"}, {"mode": "nvfp4"}, MinMaxQuantizer),
        ({"quantizer": "lsq"}, {"mode": "mxfp8"}, FixedBlockScaleQuantizer),
        (
            {"mode": "mxfp4", "fake_quant_after_n_steps": 3},
            {"mode": "mxfp4"},
            MinMaxQuantizer,
        ),
        ({"mode": "mxfp4"}, {"bits": 4}, MinMaxQuantizer),
        ({"mode": "nvfp4"}, {"mode": "q4_0"}, MinMaxQuantizer),
    ],
)
def test_quantizer_of_a_layer_depends_on_its_mode(qat, spec, expected):
    quantizer = make_quantizer(QATConfig(**qat), QuantSpec(**spec), mx.float16)
    assert type(quantizer) is expected
