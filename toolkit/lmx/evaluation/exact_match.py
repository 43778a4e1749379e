"""Exact match: the share of questions with exactly the expected answer, or number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, pvariance

from ..generation.engine import Generator
from ..generation.prompt import Messages
from ..generation.requests import generate_requests, make_request
from ..generation.sampling import Sampling

MAX_WRONG_SHOWN = 5


@dataclass(frozen=True)
class ExactMatchItem:
    """A chat that ends with the user, its expected answer, its skill, and what the chat
    template gets with it."""

    messages: Messages
    answer: str
    skill: str
    tools: tuple[dict, ...] | None = None
    template_kwargs: dict | None = None

    def prompt(self, generator: Generator) -> list[int]:
        """The tokens of the question, without a chain of thought."""
        return generator.encode_chat(
            self.messages,
            thinking=False,
            tools=self.tools,
            template_kwargs=self.template_kwargs,
        )


@dataclass(frozen=True)
class ExactMatch:
    """Exact-match rates between 0 and 1, and a few wrong answers.

    Attributes:
        by_skill: number of correct answers and of questions, by skill.
        wrong: the first wrong answers as (item, completion).
        correct: 1 or 0 for every item, in order.
    """

    overall: float
    stderr: float
    by_skill: dict[str, tuple[int, int]]
    wrong: list[tuple[ExactMatchItem, str]]
    correct: list[int]

    def change_from(self, reference: "ExactMatch") -> tuple[float, float]:
        """The difference to the rate of another model on the same items, and its
        standard error over the paired items."""
        pairs = zip(self.correct, reference.correct, strict=True)
        changes = [after - before for after, before in pairs]
        return mean(changes), (pvariance(changes) / len(changes)) ** 0.5


def measure_exact_match(
    generator: Generator,
    items: Sequence[ExactMatchItem],
    *,
    max_tokens: int = 48,
    answer_filter: Callable[[str], object] = str.strip,
) -> ExactMatch:
    """Generate one greedy completion per item, without a chain of thought.

    Args:
        answer_filter: the part of a completion that must equal that of the answer; an
            entry of `data.answer_filters.FILTERS`.
    """
    assert items, "no items"
    prompts = [item.prompt(generator) for item in items]
    requests = [make_request(generator, p, max_tokens, Sampling()) for p in prompts]
    completions = generate_requests(generator, requests)
    by_skill, wrong, results = {}, [], []
    for item, result in zip(items, completions, strict=True):
        completion = result.text
        is_correct = answer_filter(completion) == answer_filter(item.answer)
        correct, count = by_skill.get(item.skill, (0, 0))
        by_skill[item.skill] = correct + is_correct, count + 1
        results.append(int(is_correct))
        if not is_correct:
            wrong.append((item, completion))
    rate = 1 - len(wrong) / len(items)
    stderr = sqrt(rate * (1 - rate) / len(items))
    by_skill = dict(sorted(by_skill.items()))
    return ExactMatch(rate, stderr, by_skill, wrong[:MAX_WRONG_SHOWN], results)
