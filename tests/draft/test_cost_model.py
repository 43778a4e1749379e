"""The cost model and the accepted length, against closed forms and a simulation."""

import numpy as np
import pytest
from lmx.draft.acceptance import predict_accepted_length
from lmx.draft.cost_model import SpeculationCosts


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9, 1.0])
def test_accepted_length_is_geometric_series_for_constant_rate(rate, num_draft_tokens):
    probs = np.full((20_000, num_draft_tokens), rate)
    length = predict_accepted_length([probs], num_draft_tokens)
    assert length == pytest.approx(
        sum(rate**i for i in range(num_draft_tokens + 1)), rel=1e-3
    )


def test_accepted_length_matches_simulation():
    """Probabilities that depend on the text and on the place in the draft."""
    rng = np.random.default_rng(0)
    texts = np.array([0.95, 0.1, 0.5, 0.9, 0.9, 0.2])
    probs = np.tile(texts[:, None] * [1.0, 0.9, 0.6], (20, 1))
    position = rounds = 0
    while rounds < 40_000:
        accepted = 0
        start = position % len(probs)
        while accepted < 3 and start + accepted < len(probs):
            if rng.random() >= probs[start, accepted]:
                break
            accepted += 1
        position += min(accepted + 1, len(probs) - start)
        rounds += 1
    assert predict_accepted_length([probs], 3) == pytest.approx(
        position / rounds, rel=0.01
    )


def test_best_draft_length_matches_theorem_and_steep_costs():
    flat = SpeculationCosts(tuple(1 + 0.08 * k for k in range(9)))
    tokens = [sum(0.8**i for i in range(k + 1)) for k in range(1, 9)]
    length, speedup = flat.best_draft_length(tokens)
    # Leviathan et al., theorem 3.8.
    assert (length, round(speedup, 2)) == (6, 2.67)
    steep = SpeculationCosts((1.0, *(1.98 + 0.98 * k for k in range(8))))
    assert steep.best_draft_length(tokens)[0] == 1
    assert steep.best_draft_length(tokens)[1] < 1
