"""What a target answers to prompts: kept by content, gone on with where it stopped."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data import cache
from ..data.shapes import Row
from ..data.template import Example
from ..generate.batching import Batcher, Request
from ..generate.chat import encode, encode_text
from ..generate.sampling import Sampling
from ..run.files import write_atomic
from ..run.report import Report
from .settings import Answers

# Prompts that are answered between two writes.
PART = 64


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and the place of their row."""

    tokens: list[int]
    where: str


def prompts(rows, tokenizer: Any, *, count: int, longest: int) -> list[Prompt]:
    """What the first rows ask, templates applied; of bare text its first half.

    Args:
        longest: tokens; longer prompts are left out.
    """
    found = []
    for row in rows:
        tokens = _asked(row, tokenizer)
        if tokens and len(tokens) <= longest:
            found.append(Prompt(tokens, row.where))
        if len(found) == count:
            break
    return found


def answered(
    model: Any,
    asked: Sequence[Prompt],
    settings: Answers,
    *,
    ends: Sequence[int],
    digest: str,
    seed: int,
    report: Report,
) -> list[Example]:
    """Prompts with their answers, of which the answers are to be learnt.

    Args:
        ends: tokens that end an answer, and are a part of it.
        digest: of the model.
    """
    drawn = settings.model_dump(include={"max_tokens", "temperatures"})
    facts = [digest, drawn, seed, sorted(ends), [prompt.tokens for prompt in asked]]
    folder = cache.root() / "answers" / cache.key_of(facts)
    parts = range(0, len(asked), PART)
    missing = [first for first in parts if not _place(folder, first).is_file()]
    if missing:
        report.say(f"answering {len(asked):,} prompts into {folder}")
    else:
        report.say(f"{len(asked):,} prompts, answered before: {folder}")
    with report.progress(len(asked), "answering") as bar:
        for first in missing:
            some = range(first, min(first + PART, len(asked)))
            said = _answer(model, asked, some, settings, frozenset(ends), seed)
            write_atomic(_place(folder, first), json.dumps(said))
            bar.update(some.stop)
    said = [
        text
        for first in parts
        for text in json.loads(_place(folder, first).read_bytes())
    ]
    return [
        _example(prompt, text) for prompt, text in zip(asked, said, strict=True) if text
    ]


def _asked(row: Row, tokenizer: Any) -> list[int]:
    if row.text is not None:
        tokens = encode_text(tokenizer, row.text)
        return list(tokens[: len(tokens) // 2])
    if row.messages is None:
        return list(encode(tokenizer, row.prompt))
    turns = [message["role"] for message in row.messages]
    last = max((n for n, role in enumerate(turns) if role == "assistant"), default=0)
    return list(encode(tokenizer, [*row.messages[:last]])) if last else []


def _answer(model, asked, some: range, settings: Answers, ends, seed: int):
    """Tokens of the answers to some of the prompts, each with its own draws."""
    temperatures = settings.temperatures
    requests = [
        Request(
            asked[number].tokens,
            settings.max_tokens,
            Sampling(
                temperature=temperatures[number % len(temperatures)], seed=seed + number
            )
            if temperatures[number % len(temperatures)]
            else Sampling(),
            ends,
        )
        for number in some
    ]
    batcher = Batcher(model)
    said = {id(request): [] for request in requests}
    for request in requests:
        batcher.submit(request)
    while not batcher.idle:
        for request, token, _ in batcher.step():
            said[id(request)].append(token)
    return [said[id(request)] for request in requests]


def _example(prompt: Prompt, answer: list[int]) -> Example:
    tokens = np.array([*prompt.tokens, *answer], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt.tokens)
    return Example(tokens, mask, prompt.where)


def _place(folder: Path, first: int) -> Path:
    return folder / f"{first:07d}.json"
