"""What a target answers to the prompts of rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np

from ..config.draft import DataGenerationConfig
from ..data import cache
from ..data.batching import Batch, BucketBatchSampler, InMemoryExamples
from ..data.record_formats import DataRecord
from ..data.tokenization import Example
from ..generation.completions import (
    CachedGenerator,
    completion_example,
)
from ..generation.prompt import encode_chat, encode_text
from ..run.logger import RunLogger
from ..training.teacher_targets import (
    TeacherTarget,
    compress_targets,
    decompress_targets,
    full_targets,
    write_teacher_targets,
)


@dataclass(frozen=True)
class Prompt:
    """Tokens to answer, and the place of their row."""

    tokens: list[int]
    where: str


def prompt_from_row(row: DataRecord, tokenizer: Any) -> list[int]:
    """What a row asks, templates applied; of bare text its first half."""
    if row.text is not None:
        tokens = encode_text(tokenizer, row.text)
        return list(tokens[: len(tokens) // 2])
    if row.messages is None:
        return list(encode_chat(tokenizer, row.prompt))
    turns = [message["role"] for message in row.messages]
    last = max((n for n, role in enumerate(turns) if role == "assistant"), default=0)
    return list(encode_chat(tokenizer, [*row.messages[:last]])) if last else []


def select_prompts(
    rows: Iterable[DataRecord],
    tokenizer: Any,
    *,
    count: int,
    longest: int,
    ask: Callable[[DataRecord, Any], list[int]] = prompt_from_row,
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


def mean_prompt_length(asked: Sequence[Prompt]) -> int:
    """Tokens of a prompt, on average."""
    return round(sum(len(prompt.tokens) for prompt in asked) / len(asked))


def generate_completions(
    asked: Sequence[Prompt],
    settings: DataGenerationConfig,
    answerer: CachedGenerator,
    *,
    seed: int,
) -> list[Example]:
    """Prompts with answers to be learnt; the temperatures take turns."""
    turns = zip(enumerate(asked), cycle(settings.temperatures))
    requests = [
        answerer.request(prompt.tokens, settings.max_tokens, heat, (seed, number))
        for (number, prompt), heat in turns
    ]
    pairs = zip(asked, answerer.generate(requests), strict=True)
    return [
        completion_example(prompt.tokens, found, prompt.where)
        for prompt, found in pairs
    ]


# --- from draft.targets: Answers of a target in batches, with what it predicted at every place.


class DistillationBatches:
    """Fixed batches of answers, in an order that every epoch draws anew.

    The target of a batch has the parts of a `Target`, and bool [B, L]: whether the next
    token is the teacher's own.

    Args:
        teacher: logits [B, L, V] of tokens [B, L].
        key: of the teacher.
        tokens: padded tokens of a batch, at most.
        top_k: tokens named of every prediction; None = all.
        logger: told how large the predictions are, which are made once and kept in the
            cache; None = the teacher is asked anew for every batch, as with `top_k`
            None.
        guessed: last tokens of every example that are not the teacher's own; None = no
            token.

    Attributes:
        digest: a hash of answers and predictions.
    """

    def __init__(
        self,
        examples: list[Example],
        teacher: Callable[[mx.array], mx.array],
        *,
        key: str,
        max_seq_length: int,
        tokens: int,
        top_k: int | None,
        seed: int,
        logger: RunLogger | None,
        guessed: Sequence[int] | None = None,
    ):
        batches = BucketBatchSampler(
            examples, max_seq_length=max_seq_length, tokens=tokens
        )
        facts = [key, InMemoryExamples(examples).digest, max_seq_length, tokens, top_k]
        self.digest = sha256(repr(facts).encode()).hexdigest()
        self.max_seq_length = max_seq_length
        self.seed = seed
        self._batches = list(batches.in_order())
        self._teacher = teacher
        self._settings = {
            "key": key,
            "max_seq_length": max_seq_length,
            "tokens": tokens,
        }
        self._settings |= {"top_k": top_k, "seed": seed}
        # Of every example, how many tokens are the teacher's own.
        guessed = guessed or [0] * len(examples)
        pairs = zip(examples, guessed, strict=True)
        self._own = [len(example.tokens) - count for example, count in pairs]
        self._kept = None
        if logger and top_k is not None:
            self._kept = write_teacher_targets(
                cache.root() / "lessons" / cache.key_of(facts),
                [mx.contiguous(batch.tokens[:, :-1]) for batch in self._batches],
                teacher,
                digest=key,
                top_k=top_k,
                info=logger.info,
            )

    def like(
        self, examples: list[Example], guessed: Sequence[int]
    ) -> "DistillationBatches":
        """Others of the same teacher, which is asked for every batch."""
        settings = self._settings | {"logger": None, "guessed": guessed}
        return DistillationBatches(examples, self._teacher, **settings)

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, place = divmod(step, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self[int(order[place])]

    def __getitem__(self, number: int) -> Batch:
        batch = self._batches[number]
        own = np.ones(batch.mask.shape, bool)
        for row, member in enumerate(batch.example_indices):
            own[row, self._own[member] - 1 :] = False
        return replace(batch, target=(*self._target(number), mx.array(own)))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def _target(self, number: int) -> TeacherTarget:
        if self._kept:
            return self._kept[number]
        logits = self._teacher(self._batches[number].tokens[:, :-1])
        top_k = self._settings["top_k"]
        return (
            full_targets(logits)
            if top_k is None
            else decompress_targets(*compress_targets(logits, top_k))
        )
