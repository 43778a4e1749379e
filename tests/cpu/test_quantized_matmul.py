"""Quantized layers that use all cores give the outputs of MLX's."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.cpu import blas, quantized_matmul
from memory_at_rest import active_memory
from mlx.utils import tree_flatten

pytestmark = pytest.mark.fused
GRIDS = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 128)]
GRIDS += [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
SHAPES = [*((n, 256) for n in range(1, 26)), (30, 256), (2, 15, 256), (256,)]


class Model(nn.Module):
    def __init__(self, mode, bits, group_size, *, bias):
        super().__init__()
        options = {"mode": mode, "bits": bits, "group_size": group_size}
        self.linear = nn.QuantizedLinear(256, 64, bias=bias, **options)
        self.embed = nn.QuantizedEmbedding(64, 256, **options)
        if bias:
            self.linear.bias = mx.linspace(-1, 1, 64)


@pytest.fixture
def calls(monkeypatch):
    """Input rows and cores of every product with codes."""
    recorded, multiply = [], quantized_matmul._quantized_matmul

    def recording(layer, x, cores):
        recorded.append((x.size // x.shape[-1], cores))
        return multiply(layer, x, cores)

    monkeypatch.setattr(quantized_matmul, "_quantized_matmul", recording)
    return recorded


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_kept_weights_give_the_same_outputs_for_one_row(grid, monkeypatch):
    model = Model(*grid, bias=True)
    quantized_matmul.use_fast_layers(model)
    x = mx.random.normal((1, 256), key=mx.random.key(0)) / 16
    expected = model.linear(x), model.embed.as_linear(x)
    names = [name for name, _ in tree_flatten(model.parameters())]
    size = quantized_matmul.keep_dequantized(model)
    assert size == 2 * 4 * 64 * 256
    assert quantized_matmul.keep_dequantized(model) == 0
    assert [name for name, _ in tree_flatten(model.parameters())] == names

    def fail(*_, **__):
        raise AssertionError("the codes were used")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "quantized_matmul", fail)
        patched.setattr(mx, "dequantize", fail)
        actual = model.linear(x), model.embed.as_linear(x)
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_replaced_scales_are_used():
    model = Model("affine", 4, 32, bias=False)
    quantized_matmul.use_fast_layers(model)
    quantized_matmul.keep_dequantized(model)
    x = mx.ones((1, 256))
    before = model.linear(x)
    model.linear.scales = 2 * model.linear.scales
    model.linear.biases = 2 * model.linear.biases
    assert mx.allclose(model.linear(x), 2 * before, rtol=1e-4)


def test_weights_are_not_kept_if_memory_is_short(monkeypatch):
    model = Model("affine", 4, 32, bias=False)
    quantized_matmul.use_fast_layers(model)
    size = 2 * 4 * 64 * 256
    monkeypatch.setattr(quantized_matmul, "available_memory", lambda: 4 * size - 1)
    assert quantized_matmul.keep_dequantized(model) == 0
    monkeypatch.setattr(quantized_matmul, "available_memory", lambda: 4 * size)
    assert quantized_matmul.keep_dequantized(model) == size


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_fast_layers_equal_mlx_for_every_row_count(grid, bias, calls):
    model = Model(*grid, bias=bias)
    inputs = [mx.random.normal(s, key=mx.random.key(len(s))) / 16 for s in SHAPES]
    expected = [(model.linear(x), model.embed.as_linear(x)) for x in inputs]
    quantized_matmul.use_fast_layers(model)
    assert type(model.linear) is quantized_matmul.FastQuantizedLinear
    assert type(model.embed) is quantized_matmul.FastQuantizedEmbedding
    for x, (linear, head) in zip(inputs, expected, strict=True):
        assert mx.allclose(model.linear(x), linear, rtol=1e-5, atol=1e-5)
        assert mx.allclose(model.embed.as_linear(x), head, rtol=1e-5, atol=1e-5)
        assert model.linear(x).shape == linear.shape
    mode, bits, _ = grid
    threshold = (
        quantized_matmul.MIN_ROWS_AFFINE[bits]
        if mode == "affine"
        else quantized_matmul.MIN_ROWS_FLOATING[mode]
    )
    assert max(calls) == (threshold - 1, 1)


def test_embedding_lookup_is_unchanged():
    model = Model("affine", 4, 64, bias=False)
    tokens = mx.array([[0, 5], [63, 5]])
    before = model.embed(tokens)
    quantized_matmul.use_fast_layers(model)
    assert mx.array_equal(model.embed(tokens), before)


@pytest.mark.parametrize("compiled", [False, True])
def test_dequantized_weights_are_not_kept_for_the_backward_pass(compiled):
    """Their gradients are those of dense layers."""
    size, count = 512, 32
    grid = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    layers = [nn.QuantizedLinear(size, size, bias=False, **grid) for _ in range(count)]
    model = nn.Sequential(*layers)
    quantized_matmul.use_fast_layers(model)
    x = mx.random.normal((32, size), key=mx.random.key(0))
    mx.eval(model.parameters(), x)

    def loss(x):
        return mx.square(model(x) * size).sum()

    gradient = mx.grad(loss)
    gradient = mx.compile(gradient) if compiled else gradient
    before = active_memory()
    actual = gradient(x)
    mx.eval(actual)
    assert mx.get_peak_memory() - before < 4 * size**2 * count // 2
    weights = [
        mx.dequantize(v.weight, v.scales, **grid, dtype=mx.float32) for v in layers
    ]
    y = x
    for weight in weights:
        y = y @ weight.T
    expected = 2 * size**2 * y
    for weight in weights[::-1]:
        expected = expected @ weight
    assert mx.abs(expected).max() > 0
    assert mx.allclose(actual, expected, rtol=1e-4, atol=1e-4 * mx.abs(expected).max())


def test_scales_and_biases_have_the_gradients_of_the_dequantized_weight():
    model = Model("affine", 4, 32, bias=False)
    quantized_matmul.use_fast_layers(model)
    x = mx.random.normal((40, 256), key=mx.random.key(0))
    grid = model.linear.scales, model.linear.biases

    def products(scales, biases):
        model.linear.scales, model.linear.biases = scales, biases
        weight = mx.dequantize(model.linear.weight, scales, biases, 32, 4)
        return mx.sin(model.linear(x)), mx.sin(x @ weight.T)

    actual, expected = (
        mx.grad(lambda *grid, n=n: products(*grid)[n].sum(), argnums=(0, 1))(*grid)
        for n in range(2)
    )
    for one, other in zip(actual, expected, strict=True):
        assert mx.abs(other).max() > 0.1
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_unquantized_layers_are_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    quantized_matmul.use_fast_layers(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Embedding]


def test_fast_linear_keeps_bfloat16():
    model = Model("affine", 4, 64, bias=True)
    model.set_dtype(mx.bfloat16)
    quantized_matmul.use_fast_layers(model)
    assert model.linear(mx.ones((30, 256), mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_cores_share_the_rows_of_large_weights(grid, calls, monkeypatch):
    """Every output is the same sum, so the bits are equal."""
    mode, bits, group_size = grid
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    model = nn.Sequential(nn.QuantizedLinear(256, 67, bias=True, **options))
    x = mx.random.normal((1, 256), key=mx.random.key(0))
    expected = model(x)
    quantized_matmul.use_fast_layers(model)
    monkeypatch.setattr(blas, "use_openblas", lambda: blas.Blas("a test", threads=3))
    monkeypatch.setattr(quantized_matmul, "MIN_WEIGHTS_PER_CORE", 67 * 256 // 3)
    assert mx.array_equal(model(x), expected)
    monkeypatch.setattr(quantized_matmul, "MIN_WEIGHTS_PER_CORE", 67 * 256)
    assert mx.array_equal(model(x), expected)
    assert calls == [(1, 3), (1, 1)]


def test_cores_are_shared_in_every_thread(monkeypatch):
    """MLX's streams belong to the thread that made them, unless they are made so."""
    model = nn.Sequential(nn.QuantizedLinear(256, 64, bias=False))
    quantized_matmul.use_fast_layers(model)
    monkeypatch.setattr(blas, "use_openblas", lambda: blas.Blas("a test", threads=2))
    monkeypatch.setattr(quantized_matmul, "MIN_WEIGHTS_PER_CORE", 1)
    mx.eval(model.parameters())

    def product(_):
        return np.array(model(mx.ones((1, 256))))

    with ThreadPoolExecutor(2) as threads:
        outputs = [product(0), *threads.map(product, range(4))]
    assert all(np.array_equal(output, outputs[0]) for output in outputs)
