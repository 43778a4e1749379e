"""InputStatistics and correction strength compared with float64 arithmetic."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from lmx.quantization.ptq.input_statistics import (
    STRENGTH_DAMPENING_FRAC,
    CalibrationShard,
    InputStatistics,
)

WIDTH, OUTPUTS, TOKENS = 16, 8, 4096
RNG = np.random.default_rng(0)
X = RNG.normal(size=(TOKENS, WIDTH)) * np.exp(RNG.normal(size=WIDTH))
WEIGHT = RNG.normal(size=(OUTPUTS, WIDTH))
LINEAR = 0.3 * X @ RNG.normal(size=(WIDTH, OUTPUTS))
NOISE = RNG.normal(size=(TOKENS, OUTPUTS))
PERTURBED_X = X + 0.1 * RNG.normal(size=X.shape)
WEIGHTS = RNG.random(TOKENS)


def statistics_of(y, errors, boundaries=(1000, 2500), weights=None) -> InputStatistics:
    """Return statistics of shards that end at `boundaries`."""
    residual_width = None if errors is None else OUTPUTS
    statistics = InputStatistics.empty(
        WIDTH, experts=None, with_cross=True, residual_width=residual_width
    )
    ends = [0, *boundaries, len(y)]
    shards = [
        CalibrationShard(
            start,
            *(
                None if value is None else mx.array(value[start:end], mx.float32)
                for value in (X, y, errors, weights)
            ),
        )
        for start, end in pairwise(ends)
    ]
    weight = mx.array(WEIGHT, mx.float32)
    statistics.add_compared(iter(shards), len(y), {"a": weight, "b": 2 * weight})
    return statistics


def expected_strength(y, errors, weights, factor=1.0) -> float:
    """Return the best scale of a correction.

    The first half of the tokens fits the correction, the second half its scale.
    """
    error = (y - X) @ (factor * WEIGHT.T) + errors
    fit, validation = slice(0, TOKENS // 2), slice(TOKENS // 2, None)
    moments = X[fit].T @ (weights[fit, None] * X[fit])
    damping = STRENGTH_DAMPENING_FRAC * np.diag(moments).mean() * np.eye(WIDTH)
    error_moments = X[fit].T @ (weights[fit, None] * error[fit])
    correction = X[validation] @ np.linalg.solve(moments + damping, error_moments)
    gain = (weights[validation, None] * correction * error[validation]).sum()
    best = gain / (weights[validation, None] * correction**2).sum()
    return 2 * best / (1 + best)


@pytest.mark.parametrize("boundaries", [(), (2048,), (1000, 2500), (100, 200, 4000)])
def test_sums_and_strengths_do_not_depend_on_shards(boundaries):
    # With few tokens, the noise is as large as the error that the inputs explain.
    y, errors, weights = PERTURBED_X, 0.05 * LINEAR + 3 * NOISE, WEIGHTS
    statistics = statistics_of(y, errors, boundaries, weights)
    weighted = weights[:, None] * X
    for value, expected in [
        (statistics.second_moments, X.T @ weighted),
        (statistics.cross_moments, weighted.T @ (y - X)),
        (statistics.residual_moments, errors.T @ weighted),
    ]:
        np.testing.assert_allclose(value, expected, atol=1e-5 * np.abs(expected).max())
    for path, factor in (("a", 1.0), ("b", 2.0)):
        expected = expected_strength(y, errors, weights, factor)
        assert 0.2 < expected < 0.99
        strength = statistics.correction_strength[path]
        assert strength == pytest.approx(expected, rel=1e-3)


def test_explained_errors_are_corrected_and_noise_is_not():
    strength = statistics_of(X, LINEAR).correction_strength["a"]
    assert 0.99 < strength <= 1
    assert statistics_of(X, NOISE).correction_strength["a"] < 0.2
    # Only the inputs have errors. The layer does not write to the residual stream.
    assert statistics_of(1.1 * X, None).correction_strength["a"] > 0.99
    assert statistics_of(X, None).correction_strength["a"] == 0


def test_invisible_tokens_are_routed_to_no_expert():
    rng = np.random.default_rng(1)
    x, experts = rng.normal(size=(12, 4)), rng.integers(0, 3, 12)
    # Each of the six tokens has two rows.
    visible = np.array([1, 1, 0, 1, 0, 1], bool)
    statistics = InputStatistics.empty(4, experts=3, with_cross=False)
    statistics.add_routed(mx.array(x, mx.float32), mx.array(experts), mx.array(visible))
    visible = np.repeat(visible, 2)
    for expert in range(3):
        rows = x[visible & (experts == expert)]
        assert statistics.counts[expert].item() == len(rows)
        moments = statistics.second_moments[expert]
        np.testing.assert_allclose(moments, rows.T @ rows, atol=1e-5)
