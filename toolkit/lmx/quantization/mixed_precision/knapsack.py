"""Multiple-choice knapsack: one option for every item, of least cost in a budget.

Dynamic programming item by item over the partial choices that no other beats in both
size and cost (Nemhauser and Ullmann 1969). Partial choices whose Lagrangian bound is
above a known choice are dropped (Dyer, Kayal and Walker 1984). The result is exact
while there are at most `MAX_STATES` partial choices.
"""

from collections.abc import Sequence

import numpy as np

# Maximum partial choices. Above it, the cheapest of every small range of sizes stay.
MAX_STATES = 1 << 17

Items = Sequence[tuple[np.ndarray, np.ndarray]]


def solve(
    items: Items, budget: int, *, max_states: int = MAX_STATES
) -> list[int] | None:
    """The option of every item; None if no choice fits into the budget.

    Args:
        items: sizes (integers) and costs of every item's options.
        budget: maximum sum of the sizes.
    """
    if sum(int(sizes.min()) for sizes, _ in items) > budget:
        return None
    price, known = _relax(items, budget)
    known = _improve(items, known, budget)
    known_cost = _cost(items, known)
    # Lower bounds for the items after each item: cost plus priced size, and size.
    remaining = [(costs + price * sizes).min() for sizes, costs in items]
    remaining = np.append(np.cumsum(remaining[::-1])[::-1], 0.0)
    remaining_size = np.cumsum([0, *(int(s.min()) for s, _ in items[::-1])])[::-1]
    size, cost = np.zeros(1, np.int64), np.zeros(1)
    trail = []
    for number, (sizes, costs) in enumerate(items, 1):
        new_size = (size[:, None] + sizes).reshape(-1)
        new_cost = (cost[:, None] + costs).reshape(-1)
        bound = new_cost + remaining[number] + price * (new_size - budget)
        fits = new_size + remaining_size[number] <= budget
        kept = np.flatnonzero(fits & (bound <= known_cost * (1 + 1e-9)))
        kept = kept[_undominated(new_size[kept], new_cost[kept], max_states)]
        if not len(kept):
            return known
        trail.append(np.divmod(kept, len(sizes)))
        size, cost = new_size[kept], new_cost[kept]
    choice, state = [], int(cost.argmin())
    for parents, options in reversed(trail):
        choice.append(int(options[state]))
        state = parents[state]
    choice = choice[::-1]
    return choice if _cost(items, choice) < known_cost else known


def _relax(items: Items, budget: int) -> tuple[float, list[int]]:
    """The Lagrangian relaxation: a price of size at which independent choices fit.

    Returns:
        The lowest such price, nearly, and the choice.
    """
    # A choice changes only at the exchange rates between two options.
    prices = [np.zeros(1)]
    for sizes, costs in items:
        more, saved = sizes[:, None] - sizes, costs - costs[:, None]
        is_exchange = (more > 0) & (saved > 0)
        prices.append(saved[is_exchange] / more[is_exchange])
    prices = np.unique(np.concatenate(prices))
    low, high = 0, len(prices) - 1
    while low < high:
        middle = (low + high) // 2
        if _size(items, _choose(items, prices[middle])) <= budget:
            high = middle
        else:
            low = middle + 1
    return float(prices[low]), _choose(items, prices[low])


def _choose(items: Items, price: float) -> list[int]:
    """Every item's best option at a price; the smallest of equals up to rounding."""
    choice = []
    for sizes, costs in items:
        total = costs + price * sizes
        is_best = total <= total.min() + 1e-9 * abs(total.min())
        choice.append(int(np.where(is_best, sizes, np.iinfo(np.int64).max).argmin()))
    return choice


def _improve(items: Items, choice: list[int], budget: int) -> list[int]:
    """Take the step that saves most cost per size while any step fits."""
    choice = list(choice)
    while True:
        space = budget - _size(items, choice)
        best, step = 0.0, None
        for number, (sizes, costs) in enumerate(items):
            more = sizes - sizes[choice[number]]
            saved = costs[choice[number]] - costs
            rate = np.where(more > space, 0.0, saved / np.maximum(more, 0.5))
            if rate.max() > best:
                best, step = rate.max(), (number, int(rate.argmax()))
        if step is None:
            return choice
        choice[step[0]] = step[1]


def _undominated(sizes: np.ndarray, costs: np.ndarray, max_states: int) -> np.ndarray:
    """Indices, by size, of choices that no smaller and cheaper choice dominates."""
    order = np.lexsort((costs, sizes))
    lowest = np.minimum.accumulate(costs[order])
    order = order[np.append(True, lowest[1:] < lowest[:-1])] if len(order) else order
    if len(order) <= max_states:
        return order
    # Costs fall with size, so the last of a range is its cheapest.
    ranges = (sizes[order] - sizes[order[0]]) * max_states // (np.ptp(sizes[order]) + 1)
    return order[np.append(ranges[1:] != ranges[:-1], True)]


def _size(items: Items, choice: list[int]) -> int:
    return sum(int(sizes[c]) for (sizes, _), c in zip(items, choice, strict=True))


def _cost(items: Items, choice: list[int]) -> float:
    return sum(float(costs[c]) for (_, costs), c in zip(items, choice, strict=True))
