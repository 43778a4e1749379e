"""How far layers make up for earlier errors, against float64 arithmetic."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quantize import DAMPENING_FRAC
from lmx.quantization.ptq.error_propagation import CalibrationShard, sum_up
from lmx.quantization.ptq.input_statistics import InputStatistics

WIDTH, OUTPUTS, TOKENS = 16, 8, 4096
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(TOKENS, WIDTH)) * np.exp(DRAW.normal(size=WIDTH))
WEIGHT = DRAW.normal(size=(OUTPUTS, WIDTH))
LINEAR = 0.3 * X @ DRAW.normal(size=(WIDTH, OUTPUTS))
NOISE = DRAW.normal(size=(TOKENS, OUTPUTS))
OTHER = X + 0.1 * DRAW.normal(size=X.shape)
COUNTS = DRAW.random(TOKENS)


def summed(y, errors, cuts=(1000, 2500), weights=None) -> InputStatistics:
    """Of parts that end at `cuts`."""
    found = InputStatistics.empty(WIDTH, experts=None, with_cross=True)
    ends = [0, *cuts, len(y)]
    parts = [
        CalibrationShard(
            *(
                None if value is None else mx.array(value[start:end], mx.float32)
                for value in (X, y, errors, weights)
            )
        )
        for start, end in pairwise(ends)
    ]
    weight = mx.array(WEIGHT, mx.float32)
    sum_up(found, iter(parts), len(y), {"a": weight, "b": 2 * weight})
    return found


def best_share(y, errors, weights, factor=1.0) -> float:
    """The correction of the first half, by how far it is best on the second."""
    missing = (y - X) @ (factor * WEIGHT.T) + errors
    here, there = slice(0, TOKENS // 2), slice(TOKENS // 2, None)
    squares = X[here].T @ (weights[here, None] * X[here])
    damping = DAMPENING_FRAC * np.diag(squares).mean() * np.eye(WIDTH)
    fitted = X[here].T @ (weights[here, None] * missing[here])
    made = X[there] @ np.linalg.solve(squares + damping, fitted)
    gained = (weights[there, None] * made * missing[there]).sum()
    best = gained / (weights[there, None] * made**2).sum()
    return 2 * best / (1 + best)


@pytest.mark.parametrize("cuts", [(), (2048,), (1000, 2500), (100, 200, 4000)])
def test_sums_and_shares_are_those_of_all_tokens(cuts):
    # The noise of so few tokens is as large as what inputs explain.
    y, errors, weights = OTHER, 0.05 * LINEAR + 3 * NOISE, COUNTS
    found = summed(y, errors, cuts, weights)
    weighted = weights[:, None] * X
    for mine, expected in [
        (found.squares, X.T @ weighted),
        (found.cross, weighted.T @ (y - X)),
        (found.residual, errors.T @ weighted),
    ]:
        np.testing.assert_allclose(mine, expected, atol=1e-5 * np.abs(expected).max())
    for path, factor in (("a", 1.0), ("b", 2.0)):
        expected = best_share(y, errors, weights, factor)
        assert 0.2 < expected < 0.99
        assert found.shares[path] == pytest.approx(expected, rel=1e-3)


def test_what_inputs_explain_is_made_up_for_and_noise_is_not():
    explained = summed(X, LINEAR).shares["a"]
    assert 0.99 < explained <= 1
    assert summed(X, NOISE).shares["a"] < 0.2
    # Of inputs alone, as where a layer adds to no residual stream.
    assert summed(1.1 * X, None).shares["a"] > 0.99
    assert summed(X, None).shares["a"] == 0
