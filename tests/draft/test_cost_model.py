"""What guessing brings, against closed forms and a simulation."""

import numpy as np
import pytest
from lmx.draft.acceptance import predict_accepted_length
from lmx.draft.cost_model import SpeculationCosts


@pytest.mark.parametrize("guesses", [1, 3, 8])
@pytest.mark.parametrize("rate", [0.0, 0.4, 0.9, 1.0])
def test_accepted_length_is_geometric_series_for_constant_rate(rate, guesses):
    found = predict_accepted_length([np.full(20_000, rate)], guesses)
    assert found == pytest.approx(sum(rate**i for i in range(guesses + 1)), rel=1e-3)


def test_accepted_length_matches_simulation():
    """Chances that depend on the place: rounds drawn by hand are as long."""
    random = np.random.default_rng(0)
    stands = np.tile([0.95, 0.1, 0.5, 0.9, 0.9, 0.2], 20)
    place = rounds = 0
    while rounds < 40_000:
        tries = 0
        where = place % len(stands)
        while tries < 3 and where + tries < len(stands):
            if random.random() >= stands[where + tries]:
                break
            tries += 1
        place += min(tries + 1, len(stands) - where)
        rounds += 1
    assert predict_accepted_length([stands], 3) == pytest.approx(
        place / rounds, rel=0.01
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
