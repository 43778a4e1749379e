"""What a target answers to the prompts of rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from ..data.shapes import Row
from ..data.template import Example
from ..generate.answering import Answerer, answer_all, with_answer
from ..generate.chat import encode, encode_text
from .settings import Answers


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and the place of their row."""

    tokens: list[int]
    where: str


def question(row: Row, tokenizer: Any) -> list[int]:
    """What a row asks, templates applied; of bare text its first half."""
    if row.text is not None:
        tokens = encode_text(tokenizer, row.text)
        return list(tokens[: len(tokens) // 2])
    if row.messages is None:
        return list(encode(tokenizer, row.prompt))
    turns = [message["role"] for message in row.messages]
    last = max((n for n, role in enumerate(turns) if role == "assistant"), default=0)
    return list(encode(tokenizer, [*row.messages[:last]])) if last else []


def prompts(
    rows: Iterable[Row],
    tokenizer: Any,
    *,
    count: int,
    longest: int,
    ask: Callable[[Row, Any], list[int]] = question,
) -> list[Prompt]:
    """What the first rows ask.

    Args:
        count: that many, or what the rows have.
        longest: tokens; longer prompts are left out.
        ask: gives the tokens of a row.
    """
    found = []
    for row in rows:
        tokens = ask(row, tokenizer)
        if 0 < len(tokens) <= longest:
            found.append(Prompt(tokens, row.where))
        if len(found) == count:
            break
    return found


def mean_length(asked: Sequence[Prompt]) -> int:
    """Tokens of a prompt, on average."""
    return round(sum(len(prompt.tokens) for prompt in asked) / len(asked))


def answered(
    asked: Sequence[Prompt], settings: Answers, answerer: Answerer, *, seed: int
) -> list[Example]:
    """Prompts with answers to be learnt; the temperatures take turns."""
    turns = zip(enumerate(asked), cycle(settings.temperatures))
    requests = [
        answerer.request(prompt.tokens, settings.max_tokens, heat, (seed, number))
        for (number, prompt), heat in turns
    ]
    pairs = zip(asked, answer_all(requests, answerer), strict=True)
    return [with_answer(prompt.tokens, found, prompt.where) for prompt, found in pairs]
