"""The steps of a training that has a budget of time."""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..data.batching import Batch
from ..files.artifacts import ArtifactStore
from ..files.hashes import key_of
from ..training.step import TrainStep

# The first steps compile kernels.
UNTIMED_STEPS, TIMED_STEPS = 2, 5


def steps_within(
    seconds: float,
    measure: Callable[[], float],
    store: ArtifactStore,
    facts: Sequence[str] = (),
) -> int:
    """How many steps take so long. A resumed training gets the number of the first.

    All ranks call this.

    Args:
        measure: returns the seconds of a step.
        store: keeps the number for `seconds` and these facts.
        facts: of the training, if the store is not that of one stage.
    """
    ranks = store.ranks
    key = key_of([seconds, *facts])
    if known := store.find_on_first("budget", key):
        return known.facts["steps"]
    steps = max(1, int(seconds / ranks.broadcast_object(measure())))
    if ranks.is_first:
        store.put("budget", key, lambda _: {"steps": steps})
    return steps


def seconds_per_step(
    step: TrainStep, parts: Sequence[Callable[[int], Batch | Sequence[Batch]]]
) -> float:
    """The time of some steps, whose weights are thrown away.

    Args:
        parts: what every step trains on, each of an equal share of the steps.
    """
    # The model keeps its weights.
    weights, total = step.model.trainable_parameters(), 0.0
    for batches in parts:
        for number in range(UNTIMED_STEPS + TIMED_STEPS):
            if number == UNTIMED_STEPS:
                start = time.perf_counter()
            output = step(batches(number), learning_rate=0.0, seed=0)
            mx.eval(output, step.parameters, step.optimizer.state)
        total += time.perf_counter() - start
    step.model.update(weights)
    return total / TIMED_STEPS / len(parts)
