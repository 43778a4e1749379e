"""How much tokens count, by hand."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.quantization.ptq.fisher import OWN, seen_of, token_weights
from lmx.quantization.ptq.input_statistics import InputStatistics

COUNTED = mx.array([[0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0]]).astype(mx.bool_)
SEEN = np.array([[1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
PARTS = [COUNTED[:2], COUNTED[2:]]


def test_seen_is_what_is_not_behind_the_last_that_counts():
    assert np.array_equal(seen_of(COUNTED), SEEN)


def test_all_alike_need_no_weights():
    assert token_weights(mx.ones(12), [mx.ones((3, 4), mx.bool_)]) is None


def test_without_slopes_what_is_seen_counts_alike():
    found = token_weights(None, PARTS)
    assert [part.shape for part in found] == [(8,), (4,)]
    assert np.array_equal(np.concatenate(found), SEEN.reshape(-1))


def test_weights_are_half_their_own_and_half_those_of_their_kind():
    slopes = np.array([2, 6, 10, 0, 1, 3, 8, 0], np.float64)
    found = np.concatenate(token_weights(mx.array(slopes, mx.float32), PARTS))
    counted, seen = np.array(COUNTED).reshape(-1), SEEN.reshape(-1)
    # Of the last window nothing is known but what kind its tokens are.
    kinds = np.where(counted, (6 + 10 + 8) / 3, np.where(seen, (2 + 1 + 3) / 3, 0))
    expected = kinds.copy()
    expected[:8] = (1 - OWN) * kinds[:8] + OWN * slopes
    expected *= seen.sum() / expected.sum()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.sum() == pytest.approx(seen.sum())


def test_moments_are_weighted():
    draw = np.random.default_rng(0)
    x, y, weights = draw.normal(size=(9, 4)), draw.normal(size=(9, 4)), draw.random(9)
    found = InputStatistics.empty(4, experts=None, with_cross=True)
    x, y, weights = (mx.array(v, mx.float32) for v in (x, y, weights))
    found.add(x, y, weights=weights)
    x, y, weights = (np.array(v, np.float64) for v in (x, y, weights))
    np.testing.assert_allclose(found.squares, x.T @ np.diag(weights) @ x, atol=1e-5)
    expected = x.T @ np.diag(weights) @ (y - x)
    np.testing.assert_allclose(found.cross, expected, atol=1e-5)


def test_rows_that_are_not_seen_go_to_no_expert():
    draw = np.random.default_rng(1)
    x, experts = draw.normal(size=(12, 4)), draw.integers(0, 3, 12)
    # Two rows for each of six tokens.
    seen = np.array([1, 1, 0, 1, 0, 1], bool)
    found = InputStatistics.empty(4, experts=3, with_cross=False)
    found.add_routed(mx.array(x, mx.float32), mx.array(experts), mx.array(seen))
    rows = np.repeat(seen, 2)
    for expert in range(3):
        own = x[rows & (experts == expert)]
        assert found.counts[expert].item() == len(own)
        np.testing.assert_allclose(found.squares[expert], own.T @ own, atol=1e-5)
