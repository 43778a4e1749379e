"""Exact match: the share of questions with exactly the expected answer, or number."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import mean, pvariance


@dataclass(frozen=True)
class ExactMatch:
    """Exact-match rates between 0 and 1.

    Attributes:
        by_skill: number of correct answers and of questions, by skill.
        correct: 1 or 0 for every question, in order.
    """

    overall: float
    stderr: float
    by_skill: dict[str, tuple[int, int]]
    correct: list[int]

    def change_from(self, reference: "ExactMatch") -> tuple[float, float]:
        """The difference to the rate of another model on the same questions, and its
        standard error over the paired questions."""
        pairs = zip(self.correct, reference.correct, strict=True)
        changes = [after - before for after, before in pairs]
        return mean(changes), (pvariance(changes) / len(changes)) ** 0.5


def measure_exact_match(
    answers: Iterable[tuple[str, str, str]],
    answer_filter: Callable[[str], object] = str.strip,
) -> ExactMatch:
    """Compare answers with the expected ones.

    Args:
        answers: skill, expected answer and answer of every question; at least one.
        answer_filter: the part of an answer that is compared, an entry of
            `data.answer_filters.FILTERS`.
    """
    by_skill: dict[str, tuple[int, int]] = {}
    correct = []
    for skill, expected, answer in answers:
        correct.append(int(answer_filter(answer) == answer_filter(expected)))
        right, count = by_skill.get(skill, (0, 0))
        by_skill[skill] = right + correct[-1], count + 1
    rate = mean(correct)
    stderr = sqrt(rate * (1 - rate) / len(correct))
    return ExactMatch(rate, stderr, dict(sorted(by_skill.items())), correct)
