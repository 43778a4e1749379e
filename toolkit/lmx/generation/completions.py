"""Cached completions of a teacher or target model, as training data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..data import cache
from ..data.batching import ExampleDataset, InMemoryExamples
from ..data.tokenization import Example
from ..errors import UserError
from ..files.artifacts import Origin
from ..interfaces import SINGLE_PROCESS, Communicator, Logger, Progress
from .engine import Engine
from .sampling import Sampling
from .sequence import GenerationRequest

# Completions are generated and cached in blocks: an interrupted run resumes with the
# first missing block.
BATCH_SIZE = 64


@dataclass(frozen=True)
class CachedGenerator:
    """Generates completions that are not in the cache yet.

    Attributes:
        load_model: returns a model for `Engine`; called only if needed.
        digest: hash of the model.
        stop_tokens: tokens that end a completion; the stop token is part of it.
        logger: shows progress, and damaged cache entries.
        ranks: have the same model and requests; each makes its share of the blocks.
    """

    load_model: Callable[[], Any]
    digest: str
    stop_tokens: frozenset[int]
    logger: Logger
    ranks: Communicator = SINGLE_PROCESS

    def request(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        entropy: Sequence[int],
    ) -> GenerationRequest:
        """A request to this model. `entropy` determines the seed of its samples."""
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        sampling = Sampling(temperature, seed=seed) if temperature else Sampling()
        return GenerationRequest(prompt, max_tokens, sampling, self.stop_tokens)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """The completions of the requests, from the cache or from the model."""
        starts = range(0, len(requests), BATCH_SIZE)
        blocks = [requests[start : start + BATCH_SIZE] for start in starts]
        tokens = [sum(request.max_tokens for request in block) for block in blocks]
        logger = self.logger
        with logger.progress(sum(tokens), "completions", percent=True) as progress:

            def make(number: int, _: Path) -> dict:
                model = self.load_model()
                block = blocks[number]
                return {"completions": generate_batch(model, block, progress)}

            def count(number: int, origin: Origin) -> None:
                if origin == "found":
                    progress.skip(tokens[number])
                    return
                if origin == "made elsewhere":
                    progress.advance(tokens[number])
                done = starts[number] + len(blocks[number])
                logger.info(f"generated {done:,} of {len(requests):,} completions")

            artifacts = cache.store(logger.warning, self.ranks).get_or_make_all(
                "completions",
                [self._key(block) for block in blocks],
                make,
                on_entry=count,
            )
        completions = [each for a in artifacts for each in a.facts["completions"]]
        # Another machine may have them from an earlier run, with other rounding.
        return self.ranks.broadcast_object(completions)

    def _key(self, block: Sequence[GenerationRequest]) -> str:
        settings = [[r.prompt, r.max_tokens, repr(r.sampling)] for r in block]
        return cache.key_of([self.digest, sorted(self.stop_tokens), settings])


def generate_batch(
    model: Any,
    requests: Sequence[GenerationRequest],
    progress: Progress,
) -> list[list[int]]:
    """The completions of the requests, `BATCH_SIZE` decoded together.

    Args:
        progress: counts tokens, and those that a completion ends before.
    """
    engine = Engine(model, max_batch_size=BATCH_SIZE)
    completions: dict[GenerationRequest, list[int]] = {r: [] for r in requests}
    for output in engine.run(requests):
        tokens = completions[output.request]
        tokens.append(output.token)
        left = output.request.max_tokens - len(tokens)
        progress.advance(1 + output.is_last * left)
    mx.clear_cache()
    return list(completions.values())


def replace_completions(
    examples: ExampleDataset,
    generator: CachedGenerator,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    max_seq_length: int,
    seed: int,
) -> InMemoryExamples:
    """Examples whose last completion is replaced by the model's own completion.

    The prompt is everything before the last trainable tokens; for raw text it is the
    first token (LLM-QAT, arXiv 2305.17888). Only the new completion is trainable.

    Args:
        temperatures: one completion per prompt and temperature is generated.
        max_seq_length: maximum tokens of prompt and completion together.

    Raises:
        UserError: no prompt leaves room for a completion.
    """
    sources, requests = [], []
    for index in range(len(examples)):
        example = examples[index]
        prompt = prompt_tokens(example)
        room = min(max_tokens, max_seq_length - len(prompt))
        for sample, temperature in enumerate(temperatures):
            if room > 0:
                entropy = (seed, index, sample)
                requests.append(generator.request(prompt, room, temperature, entropy))
                sources.append(example.where)
    if not requests:
        raise UserError(
            "no prompt leaves room for a completion", hint="raise data.max_seq_length"
        )
    completions = generator.generate(requests)
    return InMemoryExamples(
        completion_example(request.prompt, completion, where)
        for request, completion, where in zip(
            requests, completions, sources, strict=True
        )
    )


def prompt_tokens(example: Example) -> list[int]:
    """The tokens before the last run of trainable tokens."""
    last = int(np.flatnonzero(example.mask)[-1])
    untrained = np.flatnonzero(~example.mask[:last])
    return example.tokens[: untrained[-1] + 1].tolist()


def completion_example(prompt: list[int], completion: list[int], where: str) -> Example:
    """An example whose completion is trainable."""
    tokens = np.array([*prompt, *completion], np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), where)
