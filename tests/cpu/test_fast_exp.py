"""Fast exponentials against float64 NumPy and MLX's own functions."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.cpu import fast_exp
from mlx.nn.layers import activations

pytestmark = pytest.mark.fused
# MLX's own functions; `nn.silu` may be replaced in this process.
MLX = {"silu": activations.silu, "gelu_approx": activations.gelu_approx}


def test_exp_is_more_exact_than_mlx():
    x = np.linspace(-87, 87, 20001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    fast, reference = fast_exp.exp(mx.array(x)), mx.exp(mx.array(x))
    error = np.abs(np.array(fast) / exact - 1).max()
    assert error < 2e-7
    assert error <= np.abs(np.array(reference) / exact - 1).max()


def test_exp_saturates_and_keeps_nan():
    result = fast_exp.exp(mx.array([-90.0, -1e30, -mx.inf, mx.nan, mx.inf]))
    assert mx.all(result[:3] < 2e-38).item()
    assert mx.isnan(result[3]).item()
    assert result[4].item() > 5e37


@pytest.mark.parametrize("name", MLX)
def test_activations_and_gradients_equal_mlx(name):
    x = mx.linspace(-30, 30, 2001)
    fast, reference = getattr(fast_exp, name), MLX[name]
    for result, expected in (
        (fast(x), reference(x)),
        *zip(*(mx.vjp(f, [x], [mx.cos(x)])[1] for f in (fast, reference)), strict=True),
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_swiglu_and_gradients_equal_definition(dtype):
    gate = mx.linspace(-95, 95, 1001).astype(dtype)
    x, cotangent = mx.cos(gate), mx.sin(gate)

    def plain(gate, x):
        return gate * mx.sigmoid(gate) * x

    expected = plain(gate, x), *mx.vjp(plain, [gate, x], [cotangent])[1]
    for function in (fast_exp.swiglu, mx.compile(fast_exp.swiglu)):
        result = function(gate, x), *mx.vjp(function, [gate, x], [cotangent])[1]
        for a, b in zip(result, expected, strict=True):
            assert a.dtype == dtype
            tolerance = {"rtol": 1e-5, "atol": 1e-5}
            if dtype == mx.bfloat16:
                tolerance = {"rtol": 2e-2, "atol": 2e-2}
            a, b = (np.array(y.astype(mx.float32)) for y in (a, b))
            np.testing.assert_allclose(a, b, **tolerance)


def test_silu_works_in_shapeless_compiled_functions():
    @partial(mx.compile, shapeless=True)
    def gated(gate, x):
        return fast_exp.silu(gate) * x

    for shape in ((3, 4), (2, 5, 7)):
        x = mx.random.normal(shape, key=mx.random.key(0))
        result = mx.grad(lambda x: gated(x, x).sum())(x)
        expected = mx.grad(lambda x: (nn.sigmoid(x) * x * x).sum())(x)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
