"""Quantized layers that dequantize for many rows give the same outputs."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.cpu import patches
from mlx.utils import tree_flatten

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
def dequantized_rows(monkeypatch):
    """The row counts for which a weight was dequantized."""
    rows, multiply = [], patches._multiply

    def recording(layer, x):
        rows.append(x.size // x.shape[-1])
        return multiply(layer, x)

    monkeypatch.setattr(patches, "_multiply", recording)
    return rows


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_kept_weights_give_the_same_outputs_for_one_row(grid, monkeypatch):
    model = Model(*grid, bias=True)
    patches.dequantize_for_many_tokens(model)
    x = mx.random.normal((1, 256), key=mx.random.key(0)) / 16
    expected = model.linear(x), model.embed.as_linear(x)
    names = [name for name, _ in tree_flatten(model.parameters())]
    size = patches.keep_dequantized(model)
    assert size == 2 * 4 * 64 * 256
    assert patches.keep_dequantized(model) == 0
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
    patches.dequantize_for_many_tokens(model)
    patches.keep_dequantized(model)
    x = mx.ones((1, 256))
    before = model.linear(x)
    model.linear.scales = 2 * model.linear.scales
    model.linear.biases = 2 * model.linear.biases
    assert mx.allclose(model.linear(x), 2 * before, rtol=1e-4)


def test_weights_are_not_kept_if_memory_is_short(monkeypatch):
    model = Model("affine", 4, 32, bias=False)
    patches.dequantize_for_many_tokens(model)
    size = 2 * 4 * 64 * 256
    monkeypatch.setattr(patches, "available_memory", lambda: 4 * size - 1)
    assert patches.keep_dequantized(model) == 0
    monkeypatch.setattr(patches, "available_memory", lambda: 4 * size)
    assert patches.keep_dequantized(model) == size


def test_available_memory_is_read_from_the_kernel(tmp_path, monkeypatch):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemAvailable:    7 kB\n")
    monkeypatch.setattr(patches, "MEMORY_FILE", file)
    assert patches.available_memory() == 7 * 1024


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_dequantizing_layers_equal_mlx_for_every_row_count(
    grid, bias, dequantized_rows
):
    model = Model(*grid, bias=bias)
    inputs = [mx.random.normal(s, key=mx.random.key(len(s))) / 16 for s in SHAPES]
    expected = [(model.linear(x), model.embed.as_linear(x)) for x in inputs]
    patches.dequantize_for_many_tokens(model)
    assert type(model.linear) is patches.DequantizingLinear
    assert type(model.embed) is patches.DequantizingEmbedding
    for x, (linear, head) in zip(inputs, expected, strict=True):
        assert mx.allclose(model.linear(x), linear, rtol=1e-5, atol=1e-5)
        assert mx.allclose(model.embed.as_linear(x), head, rtol=1e-5, atol=1e-5)
        assert model.linear(x).shape == linear.shape
    mode, bits, _ = grid
    threshold = (
        patches.MIN_ROWS_AFFINE[bits]
        if mode == "affine"
        else patches.MIN_ROWS_FLOATING[mode]
    )
    assert 1 < threshold == min(dequantized_rows)
    assert max(dequantized_rows) == 30


def test_embedding_lookup_is_unchanged():
    model = Model("affine", 4, 64, bias=False)
    tokens = mx.array([[0, 5], [63, 5]])
    before = model.embed(tokens)
    patches.dequantize_for_many_tokens(model)
    assert mx.array_equal(model.embed(tokens), before)


def test_unquantized_layers_are_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    patches.dequantize_for_many_tokens(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Embedding]


def test_dequantizing_linear_keeps_bfloat16():
    model = Model("affine", 4, 64, bias=True)
    model.set_dtype(mx.bfloat16)
    patches.dequantize_for_many_tokens(model)
    assert model.linear(mx.ones((30, 256), mx.bfloat16)).dtype == mx.bfloat16
