"""Rollouts: sampled completions with their log-probabilities, many at once."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

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
) -> list[list[Completion]]:
    """Completions of prompts of any lengths, `num_generations` of each.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        temperature: of the sampled distribution; 0 = greedy.
        seed: equal models, prompts and seeds give equal completions.

    Raises:
        UserError: this model cannot be batched.
    """
    require_batchable(model)
    completions = [[Completion() for _ in range(num_generations)] for _ in prompts]
    total = len(prompts) * num_generations
    engine = Engine(model, max_batch_size=total)
    seeds = np.random.SeedSequence(seed).generate_state(total, np.uint64)
    owners: dict[GenerationRequest, Completion] = {}
    for row, sample_seed in enumerate(seeds.tolist()):
        index, sample = divmod(row, num_generations)
        request = GenerationRequest(
            prompts[index],
            max_tokens,
            Sampling(temperature, seed=sample_seed),
            stop_tokens,
            logprobs="processed",
        )
        owners[request] = completions[index][sample]
        engine.add_request(request)
    while not engine.idle:
        for output in engine.step():
            if output.error:
                raise output.error
            completion = owners[output.request]
            completion.tokens.append(output.token)
            completion.logps.append(output.logprob)
            completion.is_finished = output.token in stop_tokens
    mx.clear_cache()
    return completions
