"""The exponentials of the CPU against NumPy in float64 and MLX's own functions."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers import activations

from toolkit.model import exponentials

# MLX's own, whatever this process has put in their place.
OWN = {"silu": activations.silu, "gelu_approx": activations.gelu_approx}


def test_exponentials_are_nearer_than_those_of_mlx():
    x = np.linspace(-42, 0, 20001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    found, theirs = exponentials.exp_of_negative(mx.array(x)), mx.exp(mx.array(x))
    off = np.abs(np.array(found) / exact - 1).max()
    assert off < 2e-7
    assert off <= np.abs(np.array(theirs) / exact - 1).max()


def test_far_below_nothing_is_left_and_no_number_stays_none():
    found = exponentials.exp_of_negative(mx.array([-50.0, -1e30, -mx.inf, mx.nan]))
    assert mx.all(found[:3] < 3e-19).item()
    assert mx.isnan(found[3]).item()


@pytest.mark.parametrize("name", OWN)
def test_activations_and_their_gradients_are_those_of_mlx(name):
    x = mx.linspace(-30, 30, 2001)
    ours, theirs = getattr(exponentials, name), OWN[name]
    for found, expected in (
        (ours(x), theirs(x)),
        *zip(*(mx.vjp(f, [x], [mx.cos(x)])[1] for f in (ours, theirs)), strict=True),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_shapeless_functions_of_mlx_lm_may_hold_them():
    @partial(mx.compile, shapeless=True)
    def gated(gate, x):
        return exponentials.silu(gate) * x

    for shape in ((3, 4), (2, 5, 7)):
        x = mx.random.normal(shape, key=mx.random.key(0))
        found = mx.grad(lambda x: gated(x, x).sum())(x)
        expected = mx.grad(lambda x: (nn.sigmoid(x) * x * x).sum())(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
