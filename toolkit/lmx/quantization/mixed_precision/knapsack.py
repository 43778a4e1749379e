"""One option for every item, of the least cost that a budget holds.

The multiple-choice knapsack: item by item with all partial choices that no other beats
in both size and cost (Nemhauser and Ullmann 1969), without those that end above a known
choice by a Lagrangian bound (Dyer, Kayal and Walker 1984). Exact as long as there are
no more than `STATES` such partial choices.
"""

from collections.abc import Sequence

import numpy as np

# Partial choices kept at most; the cheapest of every small range of sizes stay.
STATES = 1 << 17

Items = Sequence[tuple[np.ndarray, np.ndarray]]


def solve(items: Items, budget: int, *, states: int = STATES) -> list[int] | None:
    """The option of every item; None if the budget holds no choice at all.

    Args:
        items: sizes (whole numbers) and costs of every item's options.
        budget: what the sizes may sum up to.
    """
    if sum(int(sizes.min()) for sizes, _ in items) > budget:
        return None
    price, known = _relaxed(items, budget)
    known = _improved(items, known, budget)
    least = _cost(items, known)
    # Of what comes after each item, cost and priced size at the least.
    ahead = [(costs + price * sizes).min() for sizes, costs in items]
    ahead = np.append(np.cumsum(ahead[::-1])[::-1], 0.0)
    room = np.cumsum([0, *(int(s.min()) for s, _ in items[::-1])])[::-1]
    size, cost = np.zeros(1, np.int64), np.zeros(1)
    trail = []
    for number, (sizes, costs) in enumerate(items, 1):
        grown = (size[:, None] + sizes).reshape(-1)
        dearer = (cost[:, None] + costs).reshape(-1)
        bound = dearer + ahead[number] + price * (grown - budget)
        alive = (grown + room[number] <= budget) & (bound <= least * (1 + 1e-9))
        chosen = np.flatnonzero(alive)
        chosen = chosen[_unbeaten(grown[chosen], dearer[chosen], states)]
        if not len(chosen):
            return known
        trail.append(np.divmod(chosen, len(sizes)))
        size, cost = grown[chosen], dearer[chosen]
    found, state = [], int(cost.argmin())
    for parents, options in reversed(trail):
        found.append(int(options[state]))
        state = parents[state]
    found = found[::-1]
    return found if _cost(items, found) < least else known


def greedy(items: Items, budget: int) -> list[int] | None:
    """From the smallest options on, the step that saves most cost per size, in turn."""
    choice = [int(np.lexsort((costs, sizes))[0]) for sizes, costs in items]
    if _size(items, choice) > budget:
        return None
    return _improved(items, choice, budget)


def _relaxed(items: Items, budget: int) -> tuple[float, list[int]]:
    """The price of size at which the items by themselves choose what the budget holds.

    Returns:
        The lowest such price, nearly, and that choice.
    """
    # Slopes between options are all the prices at which a choice changes.
    slopes = np.unique(np.concatenate([_slopes(*item) for item in items] + [[0.0]]))
    low, high = 0, len(slopes) - 1
    while low < high:
        middle = (low + high) // 2
        if _size(items, _priced(items, slopes[middle])) <= budget:
            high = middle
        else:
            low = middle + 1
    return float(slopes[low]), _priced(items, slopes[low])


def _slopes(sizes: np.ndarray, costs: np.ndarray) -> np.ndarray:
    more = sizes[:, None] - sizes
    saved = costs - costs[:, None]
    wanted = (more > 0) & (saved > 0)
    return saved[wanted] / more[wanted]


def _priced(items: Items, price: float) -> list[int]:
    """Every item's best option at a price; of equals, up to rounding, the smallest."""
    chosen = []
    for sizes, costs in items:
        whole = costs + price * sizes
        near = whole <= whole.min() + 1e-9 * abs(whole.min())
        chosen.append(int(np.where(near, sizes, np.iinfo(np.int64).max).argmin()))
    return chosen


def _improved(items: Items, choice: list[int], budget: int) -> list[int]:
    """Take what saves most for its size as long as anything that fits saves."""
    choice = list(choice)
    while True:
        left = budget - _size(items, choice)
        best, step = 0.0, None
        for number, (sizes, costs) in enumerate(items):
            more = sizes - sizes[choice[number]]
            saved = costs[choice[number]] - costs
            rate = np.where(more > left, 0.0, saved / np.maximum(more, 0.5))
            if rate.max() > best:
                best, step = rate.max(), (number, int(rate.argmax()))
        if step is None:
            return choice
        choice[step[0]] = step[1]


def _unbeaten(sizes: np.ndarray, costs: np.ndarray, states: int) -> np.ndarray:
    """Positions of those that none both smaller and cheaper beats, by size."""
    order = np.lexsort((costs, sizes))
    lowest = np.minimum.accumulate(costs[order])
    order = order[np.append(True, lowest[1:] < lowest[:-1])] if len(order) else order
    if len(order) <= states:
        return order
    # Costs fall with size, so the last of a range is its cheapest.
    ranges = (sizes[order] - sizes[order[0]]) * states // (np.ptp(sizes[order]) + 1)
    return order[np.append(ranges[1:] != ranges[:-1], True)]


def _size(items: Items, choice: list[int]) -> int:
    return sum(int(sizes[c]) for (sizes, _), c in zip(items, choice, strict=True))


def _cost(items: Items, choice: list[int]) -> float:
    return sum(float(costs[c]) for (_, costs), c in zip(items, choice, strict=True))
