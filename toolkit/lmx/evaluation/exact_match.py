"""Exact match: the share of questions with exactly the expected answer, or number."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import mean, pvariance

from ..data.answer_filters import canonical, json_value, whole

# Of the questions: how many have a key that counts as a field.
MIN_FIELD_SHARE = 0.05


@dataclass(frozen=True)
class ExactMatch:
    """Exact-match rates between 0 and 1.

    Attributes:
        by_skill: rate and stderr of the answers, and number of questions, by skill.
        by_field: rate and stderr of the values, by key of the expected JSON objects;
            without keys of few answers, which are data.
        correct: 1 or 0 for every question, in order.
    """

    overall: float
    stderr: float
    by_skill: dict[str, dict[str, float]]
    by_field: dict[str, dict[str, float]]
    correct: list[int]

    def change_from(self, reference: "ExactMatch") -> tuple[float, float]:
        """The difference to the rate of another model on the same questions, and its
        standard error over the paired questions."""
        pairs = zip(self.correct, reference.correct, strict=True)
        changes = [after - before for after, before in pairs]
        return mean(changes), (pvariance(changes) / len(changes)) ** 0.5


def measure_exact_match(
    answers: Iterable[tuple[str, str, str]],
    answer_filter: Callable[[str], object] = whole,
) -> ExactMatch:
    """Compare answers with the expected ones.

    Args:
        answers: skill, expected answer and answer of every question; at least one.
        answer_filter: the part of an answer that is compared, an entry of
            `data.answer_filters.FILTERS`.
    """
    by_skill, by_field = (defaultdict[str, list[int]](list) for _ in range(2))
    correct = []
    for skill, expected, answer in answers:
        correct.append(int(answer_filter(answer) == answer_filter(expected)))
        by_skill[skill].append(correct[-1])
        fields, given = json_value(expected), json_value(answer)
        for key, value in fields.items() if isinstance(fields, dict) else ():
            has_key = isinstance(given, dict) and key in given
            is_right = has_key and canonical(given[key]) == canonical(value)
            by_field[key].append(int(is_right))
    return ExactMatch(
        *_rate(correct).values(),
        {
            key: _rate(each) | {"questions": len(each)}
            for key, each in sorted(by_skill.items())
        },
        {
            key: _rate(each)
            for key, each in by_field.items()
            if len(each) >= MIN_FIELD_SHARE * len(correct)
        },
        correct,
    )


def _rate(correct: list[int]) -> dict[str, float]:
    rate = mean(correct)
    return {"rate": rate, "stderr": sqrt(rate * (1 - rate) / len(correct))}
