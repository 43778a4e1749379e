"""The knapsack solver compared with exhaustive search."""

from itertools import pairwise, product

import numpy as np
import pytest
from lmx.quantization.mixed_precision.knapsack import _improve, _size, solve


def greedy(items, budget):
    """Start at the smallest options and take the steps with the best cost per size."""
    choice = [int(np.lexsort((costs, sizes))[0]) for sizes, costs in items]
    if _size(items, choice) > budget:
        return None
    return _improve(items, choice, budget)


def items_of(seed, *, items, options, largest=60):
    """Return random items. Some options have equal sizes or a higher cost."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(1, largest, options), rng.exponential(1.0, options))
        for _ in range(items)
    ]


def total_size_and_cost(items, choice):
    pairs = list(zip(items, choice, strict=True))
    return sum(int(s[c]) for (s, _), c in pairs), sum(c[o] for (_, c), o in pairs)


def exhaustive(items, budget):
    choices = product(*(range(len(sizes)) for sizes, _ in items))
    totals = (total_size_and_cost(items, choice) for choice in choices)
    return min((cost for size, cost in totals if size <= budget), default=None)


@pytest.mark.parametrize("seed", range(12))
def test_solve_finds_the_best_choice(seed):
    items = items_of(seed, items=2 + seed % 4, options=2 + seed % 3)
    for budget in range(0, 61 * len(items), 23):
        best, choice = exhaustive(items, budget), solve(items, budget)
        if best is None:
            assert choice is None
            assert greedy(items, budget) is None
            continue
        size, cost = total_size_and_cost(items, choice)
        assert size <= budget
        assert cost == pytest.approx(best, rel=1e-9)


def test_the_best_choice_may_fill_the_budget():
    """The greedy solution takes the first item's large option, and no other fits."""
    options = [([0, 3], [5.0, 0.0]), *[([0, 2], [3.0, 0.0])] * 2]
    items = [(np.array(sizes), np.array(costs)) for sizes, costs in options]
    assert greedy(items, 4) == [1, 0, 0]
    assert solve(items, 4) == [0, 1, 1]


def test_greedy_misses_the_best_choice():
    """Negative control: the greedy solution can be worse."""
    items = [items_of(seed, items=4, options=4) for seed in range(20)]
    is_worse = [
        total_size_and_cost(i, greedy(i, 100))[1] > 1.001 * exhaustive(i, 100)
        for i in items
        if greedy(i, 100)
    ]
    assert any(is_worse)


@pytest.mark.parametrize("states", [1 << 17, 64])
def test_solve_fits_the_budget_and_beats_greedy_with_many_items(states):
    items = items_of(3, items=60, options=18, largest=100_000)
    for budget in range(500_000, 5_000_000, 1_100_000):
        choice = solve(items, budget, max_states=states)
        size, cost = total_size_and_cost(items, choice)
        assert size <= budget
        assert cost <= total_size_and_cost(items, greedy(items, budget))[1]


def test_solve_costs_no_more_with_a_larger_budget():
    items = items_of(5, items=20, options=9, largest=5_000)
    costs = [
        total_size_and_cost(items, solve(items, budget))[1]
        for budget in range(15_000, 90_000, 977)
    ]
    assert all(after <= before for before, after in pairwise(costs))
    assert costs[-1] == pytest.approx(sum(c.min() for _, c in items))
