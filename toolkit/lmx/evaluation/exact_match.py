"""Skill accuracy: the share of questions answered with exactly the one right answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from ..generation.engine import Generator
from ..generation.prompt import Messages

SHOWN = 5


@dataclass(frozen=True)
class ExactMatchItem:
    """A chat that ends with the user, its one right answer and the kind of skill."""

    messages: Messages
    answer: str
    skill: str


@dataclass(frozen=True)
class ExactMatch:
    """Shares between 0 and 1, and a few answers to look at."""

    overall: float
    stderr: float
    by_skill: dict[str, tuple[int, int]]
    """skill: (right, asked)"""
    wrong: list[tuple[ExactMatchItem, str]]
    """The first few wrong answers as (question, what the model said)."""


def measure_exact_match(
    generator: Generator, questions: Sequence[ExactMatchItem], *, max_tokens: int = 48
) -> ExactMatch:
    """Ask every question once, greedily, without a chain of thought.

    An answer is right when it equals the expected one, white space around both aside.
    """
    assert questions, "no questions to ask"
    prompts = [generator.encode_chat(q.messages, thinking=False) for q in questions]
    answers = generator.batch_generate(prompts, max_tokens=max_tokens)
    by_skill, wrong = {}, []
    for question, said in zip(questions, answers, strict=True):
        is_right = said.strip() == question.answer.strip()
        right, asked = by_skill.get(question.skill, (0, 0))
        by_skill[question.skill] = right + is_right, asked + 1
        if not is_right:
            wrong.append((question, said))
    share = 1 - len(wrong) / len(questions)
    stderr = sqrt(share * (1 - share) / len(questions))
    return ExactMatch(share, stderr, dict(sorted(by_skill.items())), wrong[:SHOWN])
