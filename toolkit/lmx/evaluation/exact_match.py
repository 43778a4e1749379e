"""Exact match: the share of questions with exactly the expected answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from ..generation.engine import Generator
from ..generation.prompt import Messages

MAX_WRONG_SHOWN = 5


@dataclass(frozen=True)
class ExactMatchItem:
    """A chat that ends with the user, its expected answer and its skill."""

    messages: Messages
    answer: str
    skill: str


@dataclass(frozen=True)
class ExactMatch:
    """Exact-match rates between 0 and 1, and a few wrong answers.

    Attributes:
        by_skill: number of correct answers and of questions, by skill.
        wrong: the first wrong answers as (item, completion).
    """

    overall: float
    stderr: float
    by_skill: dict[str, tuple[int, int]]
    wrong: list[tuple[ExactMatchItem, str]]


def measure_exact_match(
    generator: Generator, items: Sequence[ExactMatchItem], *, max_tokens: int = 48
) -> ExactMatch:
    """Generate one greedy completion per item, without a chain of thought.

    A completion is correct if it equals the answer; surrounding white space is ignored.
    """
    assert items, "no items"
    prompts = [generator.encode_chat(item.messages, thinking=False) for item in items]
    completions = generator.batch_generate(prompts, max_tokens=max_tokens)
    by_skill, wrong = {}, []
    for item, completion in zip(items, completions, strict=True):
        is_correct = completion.strip() == item.answer.strip()
        correct, count = by_skill.get(item.skill, (0, 0))
        by_skill[item.skill] = correct + is_correct, count + 1
        if not is_correct:
            wrong.append((item, completion))
    rate = 1 - len(wrong) / len(items)
    stderr = sqrt(rate * (1 - rate) / len(items))
    by_skill = dict(sorted(by_skill.items()))
    return ExactMatch(rate, stderr, by_skill, wrong[:MAX_WRONG_SHOWN])
