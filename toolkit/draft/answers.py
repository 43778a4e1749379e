"""What a target answers to the prompts of rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.shapes import Row
from ..data.template import Example
from ..generate.answering import Answerer, answer_all
from ..generate.batching import Request
from ..generate.chat import encode, encode_text
from ..generate.sampling import Sampling
from .settings import Answers


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and the place of their row."""

    tokens: list[int]
    where: str


def prompts(
    rows: Iterable[Row], tokenizer: Any, *, count: int, longest: int
) -> list[Prompt]:
    """What the first rows ask, templates applied; of bare text its first half.

    Args:
        count: that many, or what the rows have.
        longest: tokens; longer prompts are left out.
    """
    found = []
    for row in rows:
        tokens = _asked(row, tokenizer)
        if 0 < len(tokens) <= longest:
            found.append(Prompt(tokens, row.where))
        if len(found) == count:
            break
    return found


def answered(
    asked: Sequence[Prompt], settings: Answers, answerer: Answerer, *, seed: int
) -> list[Example]:
    """Prompts with their answers, of which the answers are to be learnt."""
    requests = [
        _request(prompt, number, settings, answerer, seed)
        for number, prompt in enumerate(asked)
    ]
    pairs = zip(asked, answer_all(requests, answerer), strict=True)
    return [_example(prompt, answer) for prompt, answer in pairs]


def _asked(row: Row, tokenizer: Any) -> list[int]:
    if row.text is not None:
        tokens = encode_text(tokenizer, row.text)
        return list(tokens[: len(tokens) // 2])
    if row.messages is None:
        return list(encode(tokenizer, row.prompt))
    turns = [message["role"] for message in row.messages]
    last = max((n for n, role in enumerate(turns) if role == "assistant"), default=0)
    return list(encode(tokenizer, [*row.messages[:last]])) if last else []


def _request(
    prompt: Prompt, number: int, settings: Answers, answerer: Answerer, seed: int
) -> Request:
    """The temperatures take turns; every drawn answer has draws of its own."""
    temperature = settings.temperatures[number % len(settings.temperatures)]
    drawn = np.random.SeedSequence([seed, number]).generate_state(1)
    sampling = Sampling(temperature, seed=int(drawn[0])) if temperature else Sampling()
    ends = answerer.end_tokens
    return Request(prompt.tokens, settings.max_tokens, sampling, ends)


def _example(prompt: Prompt, answer: list[int]) -> Example:
    tokens = np.array([*prompt.tokens, *answer], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt.tokens)
    return Example(tokens, mask, prompt.where)
