"""The accepted length at the end of a training, from that of its first steps."""

import math

import numpy as np

# The fit has this many of the last points; the first steps are steeper.
FIT_POINTS = 4


class Forecast:
    """Extrapolates accepted lengths, which grow with the logarithm of the steps.

    Args:
        steps: of the whole training.
    """

    def __init__(self, steps: int):
        self.steps = steps
        self._points: list[tuple[float, float]] = []

    def add(self, step: int, accepted_length: float) -> None:
        """Add the accepted length after a step. That before the training is ignored."""
        if step:
            self._points.append((math.log(step), accepted_length))

    @property
    def at_the_end(self) -> float | None:
        """The accepted length after all steps; None = it is too early to say."""
        points = np.array(self._points[-FIT_POINTS:])
        if len(points) < 2:
            return None
        slope, start = np.polyfit(*points.T, 1)
        return max(1.0, float(start + slope * math.log(self.steps)))
