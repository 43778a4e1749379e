"""Rollouts: sampled completions with their log-probabilities, many at once."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..interfaces import SINGLE_PROCESS, Communicator
from .engine import Engine
from .kv_cache.batch import require_batchable
from .sampling import Sampling
from .sequence import GenerationRequest


@dataclass
class Completion:
    """A sampled completion.

    Attributes:
        tokens: with the stop token, if it has one.
        logps: log-probabilities of the tokens in the distribution that was sampled.
        is_finished: whether it ends with a stop token.
    """

    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_finished: bool = False


def sample_completions(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    num_generations: int,
    max_tokens: int,
    temperature: float,
    stop_tokens: Collection[int],
    seed: int,
    ranks: Communicator = SINGLE_PROCESS,
) -> list[list[Completion]]:
    """Completions of prompts of any lengths, `num_generations` of each.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        temperature: of the sampled distribution; 0 = greedy.
        seed: equal models, prompts and seeds give equal completions.
        ranks: have the same model and prompts; each completes its share of them.

    Raises:
        UserError: this model cannot be batched.
    """
    require_batchable(model)
    total = len(prompts) * num_generations
    seeds = np.random.SeedSequence(seed).generate_state(total, np.uint64)

    def complete(share: Iterable[tuple]) -> Iterator[list[tuple]]:
        requests = [
            [
                GenerationRequest(
                    prompt,
                    max_tokens,
                    Sampling(temperature, seed=sample_seed),
                    stop_tokens,
                    logprobs="processed",
                )
                for sample_seed in sample_seeds
            ]
            for prompt, sample_seeds in share
        ]
        flat = [request for group in requests for request in group]
        completions = {request: Completion() for request in flat}
        engine = Engine(model, max_batch_size=max(1, len(flat)))
        for output in engine.run(flat):
            completion = completions[output.request]
            completion.tokens.append(output.token)
            completion.logps.append(output.logprob)
            completion.is_finished = output.token in output.request.stop_tokens
        for group in requests:
            yield [astuple(completions[request]) for request in group]

    rows = seeds.reshape(len(prompts), num_generations).tolist()
    groups = ranks.divide(zip(prompts, rows, strict=True), complete)
    mx.clear_cache()
    return [[Completion(*each) for each in group] for group in groups]
