"""What every step of a quantization is worth, on tokens held out; undone if nothing."""

import math
from collections.abc import Callable

import mlx.core as mx

from ..train.targets import Targets
from .student import Student


class Gates:
    """Keeps the best of what it is shown.

    Args:
        student: any candidate's tensors fit into it.
        held_out: what the unquantized model predicts, on tokens to judge by.
        say: told what every step is worth.

    Attributes:
        tensors: of the best candidate so far, by name.
        divergences: of all candidates by name, in nats per position.
    """

    def __init__(
        self,
        student: Student,
        held_out: Targets,
        say: Callable[[str], None],
    ):
        self.tensors: dict[str, mx.array] = {}
        self.divergences: dict[str, float] = {}
        self.kept = ""
        self._student = student
        self._held_out = held_out
        self._say = say

    @property
    def best(self) -> float:
        """The divergence of the best candidate."""
        return self.divergences.get(self.kept, math.inf)

    def judge(self, name: str, tensors: dict[str, mx.array]) -> bool:
        """Measure a candidate and keep it if it is better than what was kept.

        The student has the tensors of the best one afterwards.
        """
        self._student.put(tensors)
        found = self._student.divergence(self._held_out)
        found = math.inf if math.isnan(found) else found
        self.divergences[name] = found
        line = f"{name}: held-out KL {found:.4g}"
        if self.kept:
            line += f" ({self.kept} {self.best:.4g})"
        is_better = found < self.best
        if is_better or not self.kept:
            self.kept, self.tensors = name, tensors
        else:
            line += f": undone, {self.kept} is kept"
            self._student.put(self.tensors)
        self._say(line)
        return is_better
