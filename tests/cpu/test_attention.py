"""Attention by blocks against softmax(q k^T) v in NumPy, and MLX's own gradients."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.cpu.attention import BLOCK, attention
from lmx.cpu.patches import replace_slow_functions

OWN = mx.fast.scaled_dot_product_attention
LENGTHS = (5, BLOCK, 2 * BLOCK + 3)


def inputs(length: int, heads: int = 4, groups: int = 2, size: int = 8):
    keys = mx.random.split(mx.random.key(length), 4)
    counts = (heads, groups, groups, heads)
    return [
        2 * mx.random.normal((2, count, length, size), key=key)
        for count, key in zip(counts, keys, strict=True)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_equals_numpy_in_float64(length, causal):
    *given, _ = inputs(length)
    q, k, v = (np.array(x, np.float64) for x in given)
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = 0.3 * q @ k.swapaxes(-1, -2)
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    found = attention(*given, 0.3, causal)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_are_those_of_mlx(length, causal):
    *given, cotangent = inputs(length)
    mask = "causal" if causal else None

    def theirs(q, k, v):
        return OWN(q, k, v, scale=0.3, mask=mask)

    def ours(q, k, v):
        return attention(q, k, v, 0.3, causal)

    expected = mx.vjp(theirs, given, [cotangent])[1]
    for compiled in (ours, mx.compile(ours)):
        found = mx.vjp(compiled, given, [cotangent])[1]
        for ours_, theirs_ in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours_, theirs_, rtol=1e-4, atol=2e-5)


def test_a_query_sees_nothing_behind_it():
    q, k, v, _ = inputs(BLOCK + 9)
    changed = mx.where(mx.arange(BLOCK + 9)[:, None] < BLOCK + 2, v, 1e3)
    before, after = (attention(q, k, x, 0.3, True) for x in (v, changed))
    assert mx.array_equal(before[..., : BLOCK + 2, :], after[..., : BLOCK + 2, :])
    assert not mx.allclose(before, after)


def test_in_mlx_s_place_it_leaves_the_rest_to_mlx():
    replace_slow_functions()
    q, k, v, _ = inputs(96)
    seen = mx.random.uniform(shape=(96, 96), key=mx.random.key(0)) < 0.9
    for settings in ({"mask": "causal"}, {"mask": seen}, {}, {"sinks": mx.ones(4)}):
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **settings)
        expected = OWN(q, k, v, scale=0.3, **settings)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
