"""Training and benchmark data of draft models: prompts, completions and batches."""

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
from ..generation.completions import CachedGenerator, completion_example
from ..generation.prompt import Messages, encode_chat, encode_text
from ..interfaces import SINGLE_PROCESS, Communicator, Logger
from ..training.teacher_cache import PartTargets, cache_part_targets
from ..training.teacher_targets import full_targets

CHAT, TEXT, COPYING = "chat", "text", "copying"
COPY_INSTRUCTION = "Say that again."


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and the location of its record."""

    tokens: list[int]
    where: str


PromptSets = dict[str, list[Prompt]]


def prompt_from_record(record: DataRecord, tokenizer: Any) -> list[int]:
    """The prompt of a record with the chat template; the first half of raw text."""
    if record.text is not None:
        tokens = encode_text(tokenizer, record.text)
        return list(tokens[: len(tokens) // 2])
    if record.messages is None:
        return _encode(record, record.prompt, tokenizer)
    roles = [message["role"] for message in record.messages]
    last = max((n for n, role in enumerate(roles) if role == "assistant"), default=0)
    if not last:
        return []
    return _encode(record, [*record.messages[:last]], tokenizer)


def _encode(record: DataRecord, prompt: str | Messages, tokenizer: Any) -> list[int]:
    """A prompt with the tools and the template's arguments of its record."""
    tokens = encode_chat(
        tokenizer,
        prompt,
        tools=record.tools,
        template_kwargs=record.chat_template_kwargs,
    )
    return list(tokens)


def select_prompts(
    records: Iterable[DataRecord],
    tokenizer: Any,
    *,
    count: int,
    max_prompt_tokens: int,
    to_prompt: Callable[[DataRecord, Any], list[int]] = prompt_from_record,
) -> list[Prompt]:
    """The prompts of the first records.

    Args:
        count: maximum number of prompts.
        max_prompt_tokens: longer prompts are skipped.
        to_prompt: returns the prompt tokens of a record; empty = skip the record.
    """
    prompts = []
    for record in records:
        tokens = to_prompt(record, tokenizer)
        if 0 < len(tokens) <= max_prompt_tokens:
            prompts.append(Prompt(tokens, record.where))
        if len(prompts) == count:
            break
    return prompts


def mean_prompt_length(prompts: Sequence[Prompt]) -> int:
    """Mean tokens per prompt, rounded."""
    return round(sum(len(prompt.tokens) for prompt in prompts) / len(prompts))


def prompt_sets(
    records: Iterable[DataRecord], tokenizer: Any, *, count: int, max_prompt_tokens: int
) -> PromptSets:
    """Benchmark prompts by kind: chat, text continuation, and copying.

    The acceptance rate depends mainly on the kind of text, so results are reported per
    kind. In copying prompts the completion is part of the prompt, as in editing.

    Args:
        count: maximum number of prompts, split evenly; at least one per kind.
        max_prompt_tokens: longer prompts are skipped.
    """
    sets: PromptSets = {CHAT: [], TEXT: [], COPYING: []}
    for record in records:
        kind = CHAT if record.text is None else TEXT
        for name, to_prompt in {
            kind: prompt_from_record,
            COPYING: _copy_prompt,
        }.items():
            if len(sets[name]) < count:
                sets[name] += select_prompts(
                    [record],
                    tokenizer,
                    count=1,
                    max_prompt_tokens=max_prompt_tokens,
                    to_prompt=to_prompt,
                )
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    return {
        name: prompts[: max(1, count // len(sets))] for name, prompts in sets.items()
    }


def _copy_prompt(record: DataRecord, tokenizer: Any) -> list[int]:
    """A prompt that contains its completion; empty if there is nothing to copy."""
    if record.text is not None:
        half = record.text[: len(record.text) // 2]
        return encode_text(tokenizer, f"{half}\n{half[: len(half) // 2]}")
    messages = record.messages or (
        {"role": "user", "content": record.prompt},
        {"role": "assistant", "content": record.completion},
    )
    last = max(
        n for n, message in enumerate(messages) if message["role"] == "assistant"
    )
    if not messages[last]["content"]:  # a tool call
        return []
    instruction = {"role": "user", "content": COPY_INSTRUCTION}
    prompt = [*messages[: last + 1], instruction]
    return _encode(record, prompt, tokenizer)


def generate_completions(
    prompts: Sequence[Prompt],
    config: DataGenerationConfig,
    generator: CachedGenerator,
    *,
    seed: int,
) -> list[list[int]]:
    """The target's completions of the prompts.

    The temperatures of the config are used in turn.
    """
    requests = [
        generator.request(prompt.tokens, config.max_tokens, temperature, (seed, index))
        for (index, prompt), temperature in zip(
            enumerate(prompts), cycle(config.temperatures)
        )
    ]
    return generator.generate(requests)


def completion_examples(
    prompts: Sequence[Prompt], completions: Sequence[list[int]]
) -> list[Example]:
    """Training examples: prompts with their completions, which alone are trained."""
    return [
        completion_example(prompt.tokens, completion, prompt.where)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


class DistillationBatches:
    """Batches of completions with the target's predictions, shuffled every epoch.

    The target of a batch has the parts of a `TeacherTarget`.

    Args:
        teacher: maps tokens [B, L] to logits [B, L, V].
        key: hash of the teacher.
        tokens: maximum tokens per batch, including padding.
        top_k: tokens stored per prediction; None = the teacher runs for every batch.
        vocab_size: only the first so many tokens are predicted; None = all.
        logger: logs the size of the predictions, which are computed once and cached.
        ranks: have the same examples; they share the work of `cache_targets`.

    Attributes:
        digest: hash of the completions and predictions.
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
        vocab_size: int | None = None,
        seed: int,
        logger: Logger,
        ranks: Communicator = SINGLE_PROCESS,
    ):
        batches = BucketBatchSampler(
            examples, max_seq_length=max_seq_length, batch_tokens=tokens
        )
        facts = [key, InMemoryExamples(examples).digest, max_seq_length, tokens, top_k]
        facts.append(vocab_size)
        self.digest = sha256(repr(facts).encode()).hexdigest()
        self.seed = seed
        self.ranks = ranks
        self._batches = list(batches.in_order())
        self._teacher = teacher
        self._top_k, self._vocab_size = top_k, vocab_size
        self._key, self._logger = key, logger
        self._cached_targets: PartTargets | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, from 0, over any number of epochs."""
        return self[self.index_of(step)]

    def index_of(self, step: int) -> int:
        """The index of the batch of a step."""
        epoch, position = divmod(step, len(self))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return int(order[position])

    def tokens_of(self, index: int) -> mx.array:
        """The tokens [B, L] of a batch that the target reads."""
        return self._batches[index].tokens[:, :-1]

    def __getitem__(self, index: int) -> Batch:
        self.cache_targets()
        if self._cached_targets:
            target = self._cached_targets[index]
        else:
            logits = self._teacher(self.tokens_of(index))
            target = full_targets(logits[..., : self._vocab_size])
        return replace(self._batches[index], target=tuple(target))

    def __iter__(self) -> Iterator[Batch]:
        return (self[index] for index in range(len(self)))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often every token is trained, int [vocab_size]."""
        counts = np.zeros(vocab_size, np.int64)
        for batch in self._batches:
            tokens = np.array(batch.tokens)[:, 1:][np.array(batch.mask)]
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def cache_targets(self) -> None:
        """Compute the predictions that are to be cached and are not yet.

        All ranks must call this together, before one of them uses a batch.
        """
        if self._top_k is None or self._cached_targets:
            return
        self._cached_targets = cache_part_targets(
            cache.store(self._logger.warning, self.ranks),
            "draft_targets",
            [mx.contiguous(self.tokens_of(n)) for n in range(len(self._batches))],
            self._teacher,
            digest=self._key,
            top_k=self._top_k,
            vocab_size=self._vocab_size,
            logger=self._logger,
        )
