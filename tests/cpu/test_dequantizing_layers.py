"""Quantized layers that expand their weight for many rows give the same numbers."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.cpu import patches

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
def expanded(monkeypatch):
    """The numbers of rows for which a weight was expanded."""
    rows, multiply = [], patches._multiply

    def watched(layer, x):
        rows.append(x.size // x.shape[-1])
        return multiply(layer, x)

    monkeypatch.setattr(patches, "_multiply", watched)
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_alike_for_every_number_of_rows(grid, bias, expanded):
    model = Model(*grid, bias=bias)
    inputs = [mx.random.normal(s, key=mx.random.key(len(s))) / 16 for s in SHAPES]
    expected = [(model.linear(x), model.embed.as_linear(x)) for x in inputs]
    patches.dequantize_many_rows(model)
    assert type(model.linear) is patches.DequantizingLinear
    assert type(model.embed) is patches.DequantizingEmbedding
    for x, (linear, head) in zip(inputs, expected, strict=True):
        assert mx.allclose(model.linear(x), linear, rtol=1e-5, atol=1e-5)
        assert mx.allclose(model.embed.as_linear(x), head, rtol=1e-5, atol=1e-5)
        assert model.linear(x).shape == linear.shape
    mode, bits, _ = grid
    few = patches.FLOATING_ROWS[mode] if mode != "affine" else patches.AFFINE_ROWS[bits]
    assert 1 < few == min(expanded)
    assert max(expanded) == 30


def test_embedding_tokens_is_as_it_was():
    model = Model("affine", 4, 64, bias=False)
    tokens = mx.array([[0, 5], [63, 5]])
    before = model.embed(tokens)
    patches.dequantize_many_rows(model)
    assert mx.array_equal(model.embed(tokens), before)


def test_other_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    patches.dequantize_many_rows(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Embedding]


def test_in_16_bits_the_type_stays():
    model = Model("affine", 4, 64, bias=True)
    model.set_dtype(mx.bfloat16)
    patches.dequantize_many_rows(model)
    assert model.linear(mx.ones((30, 256), mx.bfloat16)).dtype == mx.bfloat16
