"""A model's own answers to the prompts of examples, to train on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batching import ExampleDataset, InMemoryExamples
from ..data.tokenization import Example
from ..errors import UserError
from .batching import BatchGenerator, GenerationRequest
from .sampling import Sampling

# Prompts whose answers are kept together: what was stopped goes on with the next block.
BATCH_SIZE = 64


@dataclass(frozen=True)
class CachedGenerator:
    """A model that is asked when an answer is not in the cache.

    Attributes:
        model: loads it, for a `Batcher`.
        digest: a hash of what it is.
        stop_tokens: those that end an answer; the one that does is part of it.
        say: told how far it is.
        warn: told of what is damaged in the cache.
    """

    model: Callable[[], Any]
    digest: str
    stop_tokens: frozenset[int]
    info: Callable[[str], None]
    warning: Callable[[str], None]

    def request(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        draws: Sequence[int],
    ) -> GenerationRequest:
        """A question to this model; `draws` seed what is drawn for it alone."""
        seed = int(np.random.SeedSequence(draws).generate_state(1)[0])
        sampling = Sampling(temperature, seed=seed) if temperature else Sampling()
        return GenerationRequest(prompt, max_tokens, sampling, self.stop_tokens)


def replace_completions(
    examples: ExampleDataset,
    answerer: CachedGenerator,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    max_seq_length: int,
    seed: int,
) -> InMemoryExamples:
    """The examples with answers of a model in place of their last ones.

    A prompt is what comes before the last trained tokens; of bare text, its first token
    alone (LLM-QAT, arXiv 2305.17888). The answer alone is trained.

    Args:
        temperatures: every prompt is answered once at each of these.
        max_seq_length: tokens of prompt and answer together at most.

    Raises:
        UserError: no prompt leaves room for an answer.
    """
    places, requests = [], []
    for number in range(len(examples)):
        example = examples[number]
        prompt = prompt_tokens(example)
        room = min(max_tokens, max_seq_length - len(prompt))
        for turn, temperature in enumerate(temperatures):
            if room > 0:
                draws = (seed, number, turn)
                requests.append(answerer.request(prompt, room, temperature, draws))
                places.append(example.where)
    if not requests:
        raise UserError(
            "no prompt leaves room for an answer", hint="raise data.max_seq_length"
        )
    answers = generate_all_cached(requests, answerer)
    pairs = zip(requests, answers, places, strict=True)
    return InMemoryExamples(
        completion_example(request.prompt, answer, where)
        for request, answer, where in pairs
    )


def prompt_tokens(example: Example) -> list[int]:
    """The tokens before the last ones that are trained."""
    last = int(np.flatnonzero(example.mask)[-1])
    untrained = np.flatnonzero(~example.mask[:last])
    return example.tokens[: untrained[-1] + 1].tolist()


def generate_all_cached(
    requests: Sequence[GenerationRequest], answerer: CachedGenerator
) -> list[list[int]]:
    """The answers to requests, by the cache or by the model."""
    found = []
    for start in range(0, len(requests), BATCH_SIZE):
        block = requests[start : start + BATCH_SIZE]
        asked = [[r.prompt, r.max_tokens, repr(r.sampling)] for r in block]
        kept = cache.get_or_create(
            "answers",
            cache.key_of([answerer.digest, sorted(answerer.stop_tokens), asked]),
            partial(_fill, requests=block, answerer=answerer),
            warning=answerer.warning,
        )
        if kept.made:
            done = min(start + BATCH_SIZE, len(requests))
            answerer.info(f"answered {done:,} of {len(requests):,} prompts")
        found += kept.facts["answers"]
    return found


def _fill(
    _: Path, *, requests: Sequence[GenerationRequest], answerer: CachedGenerator
) -> dict:
    return {"answers": generate_batch(answerer.model(), requests)}


def generate_batch(
    model: Any, requests: Sequence[GenerationRequest]
) -> list[list[int]]:
    """What a model answers to requests, `BLOCK` of them decoded together."""
    batcher = BatchGenerator(model, max_batch_size=BATCH_SIZE)
    for request in requests:
        batcher.submit(request)
    answers: dict[GenerationRequest, list[int]] = {request: [] for request in requests}
    while not batcher.idle:
        for request, token, _ in batcher.step():
            answers[request].append(token)
    mx.clear_cache()
    return list(answers.values())


def completion_example(prompt: list[int], answer: list[int], where: str) -> Example:
    """An example of which the answer is trained."""
    tokens = np.array([*prompt, *answer], np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), where)
