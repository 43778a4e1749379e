"""The number of steps that fit into a budget of time."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from ...draft.text_first import Batches
from ...files.artifacts import ArtifactStore
from ...files.hashes import key_of
from ...training.step import TrainStep

# The first steps compile kernels.
UNTIMED_STEPS, TIMED_STEPS = 2, 5


def steps_within(
    seconds: float,
    make_step: Callable[[], TrainStep],
    parts: Sequence[Batches],
    store: ArtifactStore,
) -> int:
    """How many steps take so long. A resumed training gets the number of the first.

    Some steps are timed, and their weights thrown away. All ranks call this.

    Args:
        make_step: makes a step with the weights of its model.
        parts: batches, each of an equal share of the steps.
        store: keeps the number.
    """
    ranks = store.ranks
    key = key_of([seconds, *(batches.digest for batches in parts)])
    if known := store.find_on_first("budget", key):
        return known.facts["steps"]
    # The model keeps its weights.
    step = make_step()
    weights, total = step.model.trainable_parameters(), 0.0
    for batches in parts:
        for number in range(UNTIMED_STEPS + TIMED_STEPS):
            if number == UNTIMED_STEPS:
                start = time.perf_counter()
            output = step(batches(number), learning_rate=0.0, seed=0)
            mx.eval(output, step.parameters, step.optimizer.state)
        total += time.perf_counter() - start
    step.model.update(weights)
    each = ranks.broadcast_object(total / TIMED_STEPS / len(parts))
    steps = max(1, int(seconds / each))
    if ranks.is_first:
        store.put("budget", key, lambda _: {"steps": steps})
    return steps
