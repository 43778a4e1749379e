"""The exponentials of the CPU against NumPy in float64 and MLX's own functions."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.cpu import fast_exp
from mlx.nn.layers import activations

# MLX's own, whatever this process has put in their place.
OWN = {"silu": activations.silu, "gelu_approx": activations.gelu_approx}


def test_exponentials_are_nearer_than_those_of_mlx():
    x = np.linspace(-87, 87, 20001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found, theirs = fast_exp.exp(mx.array(x)), mx.exp(mx.array(x))
    off = np.abs(np.array(found) / exact - 1).max()
    assert off < 2e-7
    assert off <= np.abs(np.array(theirs) / exact - 1).max()


def test_far_below_nothing_is_left_and_no_number_stays_none():
    found = fast_exp.exp(mx.array([-90.0, -1e30, -mx.inf, mx.nan, mx.inf]))
    assert mx.all(found[:3] < 2e-38).item()
    assert mx.isnan(found[3]).item()
    assert found[4].item() > 5e37


@pytest.mark.parametrize("name", OWN)
def test_activations_and_their_gradients_are_those_of_mlx(name):
    x = mx.linspace(-30, 30, 2001)
    ours, theirs = getattr(fast_exp, name), OWN[name]
    for found, expected in (
        (ours(x), theirs(x)),
        *zip(*(mx.vjp(f, [x], [mx.cos(x)])[1] for f in (ours, theirs)), strict=True),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_swiglu_and_its_gradients_are_those_of_its_definition(dtype):
    gate = mx.linspace(-95, 95, 1001).astype(dtype)
    x, cotangent = mx.cos(gate), mx.sin(gate)

    def plain(gate, x):
        return gate * mx.sigmoid(gate) * x

    expected = plain(gate, x), *mx.vjp(plain, [gate, x], [cotangent])[1]
    for ours in (fast_exp.swiglu, mx.compile(fast_exp.swiglu)):
        found = ours(gate, x), *mx.vjp(ours, [gate, x], [cotangent])[1]
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == dtype
            allowed = {"rtol": 1e-5, "atol": 1e-5}
            if dtype == mx.bfloat16:
                allowed = {"rtol": 2e-2, "atol": 2e-2}
            a, b = (np.array(y.astype(mx.float32)) for y in (a, b))
            np.testing.assert_allclose(a, b, **allowed)


def test_shapeless_functions_of_mlx_lm_may_hold_them():
    @partial(mx.compile, shapeless=True)
    def gated(gate, x):
        return fast_exp.silu(gate) * x

    for shape in ((3, 4), (2, 5, 7)):
        x = mx.random.normal(shape, key=mx.random.key(0))
        found = mx.grad(lambda x: gated(x, x).sum())(x)
        expected = mx.grad(lambda x: (nn.sigmoid(x) * x * x).sum())(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
