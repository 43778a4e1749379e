"""The number of steps that fit into a budget of time."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from ...draft.text_first import Batches
from ...files.hashes import read_index, write_index
from ...interfaces import Communicator
from ...training.step import TrainStep

# The first steps compile kernels.
UNTIMED_STEPS, TIMED_STEPS = 2, 5
NUM_STEPS = "num_steps"


def steps_within(
    seconds: float,
    make_step: Callable[[], TrainStep],
    parts: Sequence[Batches],
    folder: Path,
    ranks: Communicator,
) -> int:
    """How many steps take so long. A resumed training gets the number of the first.

    Some steps are timed, and their weights thrown away. All ranks call this.

    Args:
        make_step: makes a step with the weights of its model.
        parts: batches, each of an equal share of the steps.
        folder: keeps the number.
    """
    key = " ".join([str(seconds), *(batches.digest for batches in parts)])
    known = read_index(folder, key) if ranks.is_first else None
    known = ranks.broadcast_object(known)
    if known is None:
        # The model keeps its weights.
        step = make_step()
        weights = step.model.trainable_parameters()
        each = sum(_seconds_per_step(step, batches) for batches in parts) / len(parts)
        step.model.update(weights)
        known = {NUM_STEPS: max(1, int(seconds / ranks.broadcast_object(each)))}
        if ranks.is_first:
            folder.mkdir(exist_ok=True)
            write_index(folder, key, known)
    return known[NUM_STEPS]


def _seconds_per_step(step: TrainStep, batches: Batches) -> float:
    for number in range(UNTIMED_STEPS + TIMED_STEPS):
        if number == UNTIMED_STEPS:
            start = time.perf_counter()
        output = step(batches(number), learning_rate=0.0, seed=0)
        mx.eval(output, step.parameters, step.optimizer.state)
    return (time.perf_counter() - start) / TIMED_STEPS
