"""The loss compared with NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.models.cross_entropy import cross_entropy_sum


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_cross_entropy_equals_float64(dtype):
    generator = np.random.default_rng(0)
    logits = mx.array(generator.normal(size=(3, 5, 50)) * 10).astype(dtype)
    targets = generator.integers(0, 50, (3, 5))
    mask = generator.random((3, 5)) < 0.5
    exact = np.array(logits.astype(mx.float32), np.float64)
    losses = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(
        exact, targets[..., None], -1
    ).squeeze(-1)
    result = cross_entropy_sum(logits, mx.array(targets), mx.array(mask))
    assert result.dtype == mx.float32
    assert result.item() == pytest.approx((losses * mask).sum(), rel=1e-6)


def test_cross_entropy_of_large_logits_is_finite():
    logits = mx.array([[[3e4, 0.0], [-3e4, 3e4]]])
    targets = mx.array([[1, 1]])
    loss = cross_entropy_sum(logits, targets, mx.array([[True, True]]))
    assert loss.item() == pytest.approx(3e4)


def test_cross_entropy_ignores_masked_nan():
    logits = mx.array([[[1.0, 2.0], [mx.nan, mx.inf]]])
    targets = mx.array([[0, 0]])
    loss = cross_entropy_sum(logits, targets, mx.array([[True, False]]))
    assert loss.item() == pytest.approx(np.log(1 + np.e), rel=1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_cross_entropy_gradient_is_softmax_minus_one_hot(dtype):
    generator = np.random.default_rng(1)
    logits = mx.array(generator.normal(size=(3, 5, 50)) * 10).astype(dtype)
    targets = generator.integers(0, 50, (3, 5))
    mask = generator.random((3, 5)) < 0.5

    def loss(logits):
        return 3 * cross_entropy_sum(logits, mx.array(targets), mx.array(mask))

    result = mx.grad(loss)(logits)
    exact = np.exp(np.array(logits.astype(mx.float32), np.float64))
    softmax = exact / exact.sum(-1, keepdims=True)
    expected = 3 * (softmax - np.eye(50)[targets]) * mask[..., None]
    assert result.dtype == dtype
    allowed = 1e-6 if dtype == mx.float32 else 2e-2
    np.testing.assert_allclose(result.astype(mx.float32), expected, atol=allowed)
