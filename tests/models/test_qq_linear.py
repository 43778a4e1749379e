"""Inputs rounded as `mx.qqmm` does, and layers that do it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.quant_spec import ACTIVATION_MODES, FIXED_MODES, QuantSpec
from lmx.cpu import on_cpu
from lmx.models.lora.layers import LoRALinear
from lmx.models.quantized_layers import (
    QQLinear,
    fake_quantize_inputs,
    full_precision_inputs,
    has_quantized_inputs,
    quantize_input,
    replace_qq_layers,
)
from lmx.quantization.float_grid import FloatGrid
from mlx.utils import tree_flatten

WIDTH = 128
KEY = mx.random.key(3)
NORMAL = mx.random.normal((12, WIDTH), key=KEY)
# Multiples of a quarter step of E2M1 at scale 1: half of them are ties.
TIES = mx.random.randint(-24, 25, (12, WIDTH), key=KEY).astype(mx.float32) / 4
INPUTS = {
    "normal": NORMAL,
    "ties": TIES,
    "wide": NORMAL * 2.0 ** mx.random.randint(-20, 20, (12, WIDTH), key=KEY),
    "tiny": NORMAL * 1e-30,
    "zero": mx.zeros((2, WIDTH)),
}


def identity(mode) -> dict[str, mx.array]:
    """Codes of the identity matrix, which a product returns the rounded input of."""
    groups = WIDTH // FIXED_MODES[mode][0]
    grid = FloatGrid(mx.eye(WIDTH), mx.ones((WIDTH, groups)))
    return grid.tensors(QuantSpec(mode=mode))


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_have_the_bits_of_qqmm(mode, name):
    weight, scales = identity(mode).values()
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        x = INPUTS[name].astype(dtype)
        if not mx.isfinite(x).all():
            continue
        # One row at a time: MLX's CPU backend computes no more.
        rows = [mx.qqmm(row[None], weight, scales, mode=mode) for row in x]
        rounded = quantize_input(x, mode)
        assert rounded.dtype == dtype
        assert mx.array_equal(rounded, mx.concatenate(rows))


@pytest.mark.skipif(not on_cpu(), reason="about MLX's CPU backend")
def test_quantize_on_the_cpu_breaks_ties_in_another_way():
    """Why inputs do not simply go through `mx.quantize` and `mx.dequantize`."""
    codes, scales = mx.quantize(TIES, mode="nvfp4")
    other = mx.dequantize(codes, scales, mode="nvfp4", dtype=mx.float32)
    assert not mx.array_equal(other, quantize_input(TIES, "nvfp4"))


def nearest_in_float64(x: np.ndarray, mode: str) -> np.ndarray:
    """The definition: the nearest element of the format, times a stored scale."""
    group_size, bits = FIXED_MODES[mode]
    fraction_bits, bias = (1, 1) if bits == 4 else (3, 7)
    exponent_bits = bits - 1 - fraction_bits
    exponents = np.arange(2**exponent_bits)[:, None]
    fractions = np.arange(2**fraction_bits) / 2**fraction_bits
    numbers = (fractions + (exponents > 0)) * 2.0 ** (np.maximum(exponents, 1) - bias)
    top = 6.0 if bits == 4 else 448.0
    numbers = np.unique(numbers[numbers <= top])
    groups = x.astype(np.float64).reshape(-1, group_size)
    wanted = np.abs(groups).max(axis=1, keepdims=True) / top
    if mode == "mxfp8":
        scales = 2.0 ** np.ceil(np.log2(wanted))
    else:
        e4m3 = (np.arange(8) / 8 + 1) * 2.0 ** np.arange(-6, 9)[:, None]
        e4m3 = np.unique([*e4m3.ravel(), *(np.arange(8) * 2.0**-9)])
        e4m3 = e4m3[e4m3 <= 448]
        scales = e4m3[np.abs(wanted - e4m3).argmin(axis=1)][:, None]
    elements = groups / scales
    index = np.abs(np.abs(elements)[..., None] - numbers).argmin(axis=-1)
    return (np.sign(elements) * numbers[index] * scales).reshape(x.shape)


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_inputs_are_rounded_to_the_nearest_level(mode):
    expected = nearest_in_float64(np.array(NORMAL), mode)
    assert np.array_equal(np.array(quantize_input(NORMAL, mode)), expected)


def make_layer(mode, layer_class=QQLinear):
    dense = nn.Linear(WIDTH, 48, bias=False)
    dense.weight = mx.random.normal(dense.weight.shape, key=mx.random.key(1))
    layer = layer_class.from_linear(dense, mode=mode)
    layer.eval()
    if layer_class is QQLinear:
        layer.quantize()
    return layer


def dequantized(layer) -> mx.array:
    return mx.dequantize(layer.weight, layer.scales, mode=layer.mode, dtype=mx.float32)


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_layer_multiplies_rounded_inputs(mode, rows):
    layer = make_layer(mode)
    x = mx.random.normal((1, rows, WIDTH), key=KEY)
    expected = quantize_input(x, mode) @ dequantized(layer).T
    assert mx.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert not mx.allclose(layer(x), x @ dequantized(layer).T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ACTIVATION_MODES)
def test_layer_equals_that_of_mlx_for_one_row(mode):
    model = nn.Sequential(make_layer(mode, nn.QQLinear))
    before = model(NORMAL[:1])
    replace_qq_layers(model)
    assert type(model.layers[0]) is QQLinear
    assert mx.allclose(model(NORMAL[:1]), before, rtol=1e-5, atol=1e-5)


def test_training_mode_keeps_codes_and_has_a_gradient():
    layer, mlx_layer = (make_layer("nvfp4", kind) for kind in (QQLinear, nn.QQLinear))
    codes, expected = layer.weight, layer(NORMAL)
    layer.train()
    mlx_layer.train()
    assert layer.weight is codes
    # The reason for a layer of our own.
    assert mlx_layer.weight.dtype != codes.dtype
    output, (gradient,) = mx.vjp(layer, [NORMAL], [mx.ones((12, 48))])
    assert mx.allclose(output[0], expected, rtol=1e-5, atol=1e-5)
    ones = mx.ones((12, 48)) @ dequantized(layer)
    assert mx.allclose(gradient, ones, rtol=1e-5, atol=1e-5)


def test_full_precision_inputs_only_inside_the_context():
    model = nn.Sequential(make_layer("nvfp4"))
    layer, rounded = model.layers[0], model(NORMAL)
    assert has_quantized_inputs(model)
    with full_precision_inputs(model):
        exact = model(NORMAL)
    assert mx.allclose(exact, NORMAL @ dequantized(layer).T, rtol=1e-5, atol=1e-5)
    assert mx.array_equal(model(NORMAL), rounded)


@pytest.mark.parametrize("adapted", [False, True])
def test_fake_quantized_inputs(adapted):
    layer = nn.Linear(WIDTH, 48, bias=False)
    if adapted:
        layer = LoRALinear(layer, 4, 2.0, 0.0, KEY)
        layer.lora_b = mx.ones(layer.lora_b.shape)
    names = {name for name, _ in tree_flatten(layer.parameters())}
    exact, rounded = layer(NORMAL), layer(quantize_input(NORMAL, "nvfp4"))
    fake_quantize_inputs(layer, "nvfp4")
    assert mx.array_equal(layer(NORMAL), rounded)
    fake_quantize_inputs(layer, None)
    assert mx.array_equal(layer(NORMAL), exact)
    assert not mx.allclose(exact, rounded, rtol=1e-3, atol=1e-3)
    assert isinstance(layer, LoRALinear if adapted else nn.Linear)
    assert names == {name for name, _ in tree_flatten(layer.parameters())}
