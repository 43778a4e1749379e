"""Blockwise attention against softmax(q k^T) v in NumPy and MLX's gradients."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.cpu.attention import BLOCK, attention
from lmx.cpu.patches import mlx_attention, replace_functions

pytestmark = pytest.mark.fused
LENGTHS = (5, BLOCK, 2 * BLOCK + 3)


def inputs(length: int, heads: int = 4, groups: int = 2, size: int = 8):
    keys = mx.random.split(mx.random.key(length), 4)
    counts = (heads, groups, groups, heads)
    return [
        2 * mx.random.normal((2, count, length, size), key=key)
        for count, key in zip(counts, keys, strict=True)
    ]


def seen_keys(mask: str, length: int) -> np.ndarray:
    """Whether a query [L] attends to a key [L], for every sequence."""
    if mask == "documents":
        documents = np.cumsum(np.arange(length) % 37 == np.array([[5], [11]]), axis=-1)
        same = documents[:, :, None] == documents[:, None]
        return same & np.tri(length, dtype=bool)
    return np.ones((1, 1)) * (np.tri(length) if mask == "causal" else 1) > 0


MASKS = ("causal", "none", "documents")


def mask_argument(mask: str, length: int):
    if mask == "documents":
        return mx.array(seen_keys(mask, length))[:, None]
    return {"causal": "causal", "none": None}[mask]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_equals_float64_reference(length, mask):
    *qkv, _ = inputs(length)
    q, k, v = (np.array(x, np.float64) for x in qkv)
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = 0.3 * q @ k.swapaxes(-1, -2)
    seen = seen_keys(mask, length)
    scores = np.where(seen[:, None] if seen.ndim == 3 else seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    result = attention(*qkv, 0.3, mask_argument(mask, length))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_attention_gradients_equal_those_of_mlx(length, mask):
    *qkv, cotangent = inputs(length)
    mask = mask_argument(mask, length)

    def reference(q, k, v):
        return mlx_attention(q, k, v, scale=0.3, mask=mask)

    def blockwise(q, k, v):
        return attention(q, k, v, 0.3, mask)

    expected = mx.vjp(reference, qkv, [cotangent])[1]
    for compiled in (blockwise, mx.compile(blockwise)):
        result = mx.vjp(compiled, qkv, [cotangent])[1]
        for gradient, reference in zip(result, expected, strict=True):
            np.testing.assert_allclose(gradient, reference, rtol=1e-4, atol=2e-5)


def test_causal_attention_ignores_later_keys():
    q, k, v, _ = inputs(BLOCK + 9)
    changed = mx.where(mx.arange(BLOCK + 9)[:, None] < BLOCK + 2, v, 1e3)
    before, after = (attention(q, k, x, 0.3, "causal") for x in (v, changed))
    assert mx.array_equal(before[..., : BLOCK + 2, :], after[..., : BLOCK + 2, :])
    assert not mx.allclose(before, after)


def test_replaced_attention_passes_other_masks_to_mlx():
    replace_functions()
    q, k, v, _ = inputs(96)
    seen = mx.random.uniform(shape=(96, 96), key=mx.random.key(0)) < 0.9
    masks = "causal", seen, seen[None, None], mx.where(seen, 0.0, -9.0), None
    for settings in (*({"mask": mask} for mask in masks), {"sinks": mx.ones(4)}):
        result = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, **settings)
        expected = mlx_attention(q, k, v, scale=0.3, **settings)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 9])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_replaced_attention_of_decoding_equals_that_of_mlx(length, rows):
    """A query for every position, each with other keys, in groups of two heads."""
    replace_functions()
    q, k, v, _ = inputs(40)
    q, mask = q[:, :, :length], None
    if rows:
        mask = (
            mx.random.uniform(shape=(rows, 1, length, 40), key=mx.random.key(1)) < 0.5
        )
    result = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    expected = mlx_attention(q, k, v, scale=0.3, mask=mask)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    if rows:
        other = mlx_attention(q, k, v, scale=0.3)
        assert not mx.allclose(result, other, atol=1e-2)
