"""The speed-up on other machines, against sums by hand."""

import pytest
from lmx.draft.published_costs import PUBLISHED_PASSES, computed_speedups


def test_best_number_of_draft_tokens_counts():
    lengths = [1.6, 1.9, 2.0]
    by_hand = max(1.6 / (1.11 + 0.1), 1.9 / (1.31 + 0.2), 2.0 / (1.45 + 0.3))
    speedups = computed_speedups(lengths, 0.1, in_one_pass=False)
    assert speedups["M4 Pro, 8B, 4 bits"] == pytest.approx(by_hand)
    once = max(1.6 / (1.11 + 0.1), 1.9 / (1.31 + 0.1), 2.0 / (1.45 + 0.1))
    speedups = computed_speedups(lengths, 0.1, in_one_pass=True)
    assert speedups["M4 Pro, 8B, 4 bits"] == pytest.approx(once)


def test_costs_rise_from_one():
    for positions, costs in PUBLISHED_PASSES.values():
        assert (positions[0], costs[0]) == (1, 1)
        assert sorted(positions) == [*positions]
        assert sorted(costs) == [*costs]
