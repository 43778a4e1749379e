"""Codes and numbers compared with a search in the map of bitsandbytes."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.training.dynamic_quantization import (
    BLOCK_SIZE,
    DynamicCodes,
    dequantize,
    quantize,
    zeros,
)
from memory_at_rest import active_memory

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def dynamic_map(signed: bool) -> np.ndarray:
    """The map of arXiv 2110.02861 in float64, as bitsandbytes builds and sorts it."""
    numbers = [0.0, 1.0]
    for exponent in range(-6, 1):
        edges = np.linspace(0.1, 1, 2 ** (exponent + 6 + (not signed)) + 1)
        middles = 10.0**exponent * (edges[:-1] + edges[1:]) / 2
        numbers += [*middles, *(-middles if signed else [])]
    assert len(numbers) == 256
    return np.sort(numbers)


def reference(values: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequantized values in float64, by a search in the whole map."""
    flat = values.astype(np.float64).ravel()
    blocks = np.pad(flat, (0, -flat.size % BLOCK_SIZE)).reshape(-1, BLOCK_SIZE)
    absmax = np.abs(blocks).max(axis=1, keepdims=True)
    fractions = blocks / np.where(absmax > 0, absmax, 1)
    numbers = dynamic_map(signed)
    codes = np.abs(fractions[..., None] - numbers).argmin(axis=-1)
    if not signed:
        codes = np.maximum(codes, fractions > 0)
    shaped = [
        x.ravel()[: flat.size].reshape(values.shape)
        for x in (codes, numbers[codes] * absmax)
    ]
    return shaped[0], shaped[1]


def spread(shape, signed: bool) -> np.ndarray:
    """Values of all decades of the map, and of one below."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=shape) * 10 ** generator.uniform(-8, 0, shape)
    return (values if signed else np.abs(values)).astype(np.float32)


@SIGNED
@pytest.mark.parametrize(
    ("shape", "compiled"),
    [((3, BLOCK_SIZE), True), ((7, 100), False), ((5000,), True), ((3, 5, 70), False)],
)
def test_codes_are_the_nearest_of_the_map(signed, shape, compiled):
    values = spread(shape, signed)
    codes, expected = reference(values, signed)
    function = lambda x: quantize(x, signed=signed)  # noqa: E731
    result = (mx.compile(function) if compiled else function)(mx.array(values))
    assert result.codes.dtype == mx.uint8
    assert result.codes.shape == shape
    assert np.array_equal(result.codes, codes)
    np.testing.assert_allclose(dequantize(result, signed=signed), expected, rtol=1e-6)


@SIGNED
def test_every_code_has_its_number_and_is_its_nearest(signed):
    codes = mx.arange(256).astype(mx.uint8)
    numbers = dequantize(DynamicCodes(codes, mx.array([1.0])), signed=signed)
    np.testing.assert_allclose(numbers, dynamic_map(signed), rtol=1e-6)
    assert mx.array_equal(quantize(numbers, signed=signed).codes, codes)


@SIGNED
def test_borders_between_codes_are_the_middles(signed):
    numbers = dynamic_map(signed)
    middles = (numbers[:-1] + numbers[1:]) / 2
    for factor, code in ((1 - 1e-5, 0), (1 + 1e-5, 1)):
        values = np.append(middles * factor, 1.0).astype(np.float32)
        # A negative number that is nearer to zero has the higher code.
        higher = np.where(middles < 0, 1 - code, code)
        expected = np.arange(255) + higher
        if not signed:
            expected = np.maximum(expected, 1)
        result = quantize(mx.array(values), signed=signed).codes
        assert np.array_equal(np.array(result)[:-1], expected)


@SIGNED
def test_zeros_stay_zero(signed):
    result = quantize(mx.zeros((2, 300)), signed=signed)
    for codes in (result, zeros((2, 300), signed=signed)):
        assert mx.array_equal(codes.codes, result.codes)
        assert mx.array_equal(codes.absmax, mx.zeros(3))
        assert not dequantize(codes, signed=signed).any()


def test_second_moments_above_zero_stay_above_zero():
    """The root of a second moment is a divisor."""
    values = mx.array([1.0, 1e-9, 1e-30, 0.0])
    result = dequantize(quantize(values, signed=False), signed=False)
    np.testing.assert_allclose(result, [1.0, 0.325e-6, 0.325e-6, 0.0], rtol=1e-5)


def test_an_outlier_affects_only_its_block():
    values = np.full(2 * BLOCK_SIZE, 1e-3, np.float32)
    values[0] = 1e6
    result = dequantize(quantize(mx.array(values), signed=True), signed=True)
    assert not np.array(result)[1:BLOCK_SIZE].any()
    np.testing.assert_allclose(result[BLOCK_SIZE:], 1e-3, rtol=1e-6)


@pytest.mark.fused
def test_compiled_functions_keep_few_arrays():
    """One array per line of the map would be more than 10 times the values."""
    values = mx.random.normal((256, 1024), key=mx.random.key(0))
    mx.eval(values)
    compiled = mx.compile(lambda x: quantize(x, signed=True))
    mx.eval(compiled(values))
    before = active_memory()
    mx.eval(compiled(values))
    assert mx.get_peak_memory() - before < 3.5 * values.nbytes
