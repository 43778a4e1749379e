"""The grids of floating-point modes compared with float64 and with MLX."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models import float_formats
from lmx.models.float_formats import E2M1, E4M3, MODES, E4M3Scales, PowerOfTwoScales
from lmx.quantization.float_grid import FloatGrid
from lmx.quantization.packing import dequantize, pack

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def numbers(bits, exponent_bits) -> np.ndarray:
    """Return the value of every code in float64, by the definition of the format."""
    codes = np.arange(2**bits)
    fraction_bits = bits - 1 - exponent_bits
    exponent = (codes >> fraction_bits) % 2**exponent_bits
    fraction = codes % 2**fraction_bits / 2**fraction_bits
    lead, bias = exponent > 0, 2 ** (exponent_bits - 1) - 1
    magnitude = (lead + fraction) * 2.0 ** (np.maximum(exponent, 1) - bias)
    return np.where(codes >> (bits - 1), -magnitude, magnitude)


# The last code of each sign of E4M3 is NaN.
FORMATS = {E2M1: numbers(4, 2), E4M3: np.delete(numbers(8, 4), [127, 255])}


@pytest.mark.parametrize("number", FORMATS, ids=["E2M1", "E4M3"])
def test_codes_are_those_of_the_format(number):
    values = FORMATS[number]
    codes = np.delete(np.arange(256), [127, 255]) if number is E4M3 else np.arange(16)
    decoded = number.values(mx.array(codes.astype(np.uint8)))
    assert np.array_equal(np.array(decoded), values)
    encoded = number.codes(mx.array(values.astype(np.float32)))
    # Minus zero has the code of zero.
    assert np.array_equal(np.array(encoded), np.where(values == 0, 0, codes))
    assert number.max == values.max()


@pytest.mark.parametrize("library", ["cpu", "gpu"])
@pytest.mark.parametrize("number", FORMATS, ids=["E2M1", "E4M3"])
def test_small_negative_values_have_the_code_of_zero(number, library, monkeypatch):
    monkeypatch.setattr(float_formats, "on_cpu", lambda: library != "gpu")
    nearest = number.nearest(mx.array([-1e-6, -0.0, 0.0, 1e-6]), number.max)
    assert number.codes(nearest).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("library", ["numpy", "cpu", "gpu"])
@pytest.mark.parametrize("number", FORMATS, ids=["E2M1", "E4M3"])
def test_nearest_is_nearest(number, library, monkeypatch):
    """Within and beyond the range, at halves, at zero and among subnormal values."""
    levels = np.unique(FORMATS[number])
    generator = np.random.default_rng(0)
    samples = generator.normal(size=4000) * np.exp2(generator.uniform(-14, 11, 4000))
    halves = (levels[1:] + levels[:-1]) / 2
    values = np.concatenate([samples, levels, halves, [0.0]]).astype(np.float32)
    monkeypatch.setattr(float_formats, "on_cpu", lambda: library != "gpu")
    given = values if library == "numpy" else mx.array(values)
    nearest = np.array(number.nearest(given, number.max)).astype(np.float64)
    assert np.isin(nearest, levels).all()
    distances = np.abs(values[:, None].astype(np.float64) - levels).min(axis=1)
    assert np.array_equal(np.abs(nearest - values), distances)


def test_nearest_has_a_bound_and_keeps_nan():
    values = np.array([5.2, -7.0, np.nan, 1.2], np.float32)
    expected = np.array([4.0, -4.0, np.nan, 1.0])
    assert np.array_equal(E2M1.nearest(values, 4.0), expected, equal_nan=True)


@pytest.mark.parametrize("scales", [PowerOfTwoScales, E4M3Scales])
def test_scale_codes(scales):
    codes = mx.arange(scales.MIN_CODE, scales.MAX_CODE + 1)
    values = scales.values(codes)
    assert mx.array_equal(scales.codes(values), codes)
    exact = 2.0 ** (np.arange(1, 255) - 127.0)
    if scales is E4M3Scales:
        exact = numbers(8, 4)[1:127]
    assert np.array_equal(np.array(values), exact)
    assert scales.codes(mx.zeros(1)).item() == 0
    between = PowerOfTwoScales.codes(mx.array([1.0, 1.001, 0.999, 0.501]))
    assert between.tolist() == [127, 128, 127, 127]


def test_candidates_are_valid_scales_at_the_limits():
    for mode in MODES.values():
        limits = mx.array([0, mode.scales.MIN_CODE, mode.scales.MAX_CODE])
        candidates = np.array(mode.candidates(limits, mode.scales.SEARCH))
        assert np.isfinite(candidates).all()
        assert (candidates > 0).all()
        usual = np.array(mode.candidates(mx.array([100]), mode.scales.SEARCH))
        assert len(np.unique(usual)) == len(mode.scales.SEARCH)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_tensors_dequantize_to_the_grid_bit_for_bit(mode, dtype):
    """For any codes and scales, and the other way round for tensors of MLX."""
    spec, generator = QuantSpec(mode=mode), np.random.default_rng(1)
    number, scales = MODES[mode].elements, MODES[mode].scales
    # Products with these scales are in the range of float16.
    codes = (110, 132) if scales is PowerOfTwoScales else (1, 127)
    codes = mx.array(generator.integers(*codes, (20, 192 // spec.group_size)))
    elements = generator.choice(FORMATS[number], (20, 192)).astype(np.float32)
    grid = FloatGrid(mx.array(elements), scales.values(codes))
    served = dequantize(grid.tensors(spec), spec, dtype)
    assert served.dtype == dtype
    assert mx.array_equal(served.astype(mx.float32), grid.weight(dtype))

    weight = mx.random.normal((20, 192), key=mx.random.key(0)).astype(dtype)
    packed = pack(weight, spec, dtype)
    copied = FloatGrid.from_tensors(packed, spec)
    expected = dequantize(packed, spec, dtype).astype(mx.float32)
    assert mx.array_equal(copied.weight(dtype), expected)
    again = copied.tensors(spec)
    assert mx.array_equal(again["scales"], packed["scales"])
    assert mx.array_equal(dequantize(again, spec, dtype).astype(mx.float32), expected)


@pytest.mark.parametrize("mode", MODES)
def test_range_codes_are_the_scales_of_mlx(mode):
    """So the candidates of the search contain the scale of RTN."""
    spec = QuantSpec(mode=mode)
    sizes = mx.exp(3 * mx.random.normal((64, 1), key=mx.random.key(3)))
    weight = sizes * mx.random.normal((64, spec.group_size), key=mx.random.key(4))
    largest = mx.abs(weight).max(axis=1)
    codes = MODES[mode].range_codes(largest)
    expected = pack(weight, spec, mx.float32)["scales"].reshape(-1)
    # A quotient halfway between two scales can take either.
    assert (codes == expected).mean().item() > 0.98
