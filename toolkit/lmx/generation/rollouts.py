"""Rollouts: sampled completions with their log-probabilities, many at once.

Every prompt is processed once; its cache is then copied to all of its completions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..models.loader import make_cache
from .decode_loop import wired_limit
from .merged_caches import merge, require_batchable

PREFILL_STEP_SIZE = 512
# Finished completions leave the batch when at most this share of it is still decoded:
# every change copies the caches.
MIN_ACTIVE = 0.75


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
    completions = [[Completion() for _ in range(num_generations)] for _ in prompts]
    active = [completion for group in completions for completion in group]
    with wired_limit():
        caches = _prefill(model, prompts, num_generations)
        for cache in caches:
            if hasattr(cache, "step"):
                # Grow by what the completions may need, not by hundreds of tokens.
                cache.step = min(cache.step, max_tokens)
        last = np.repeat([prompt[-1] for prompt in prompts], num_generations)
        tokens, key = mx.array(last.astype(np.int32)), mx.random.key(seed)
        pending = None
        for _ in range(max_tokens):
            key, subkey = mx.random.split(key)
            logits = model(tokens[:, None], cache=caches)[:, -1].astype(mx.float32)
            tokens, logps = _sample(logits, temperature, subkey)
            mx.async_eval(tokens, logps)
            # The next step already runs while the last one is read.
            if pending:
                _append(*pending, stop_tokens)
            pending = active, tokens, logps
            indices = [i for i, c in enumerate(active) if not c.is_finished]
            if not indices:
                break
            if len(indices) <= MIN_ACTIVE * len(active):
                kept = mx.array(indices)
                for cache in caches:
                    cache.filter(kept)
                tokens = tokens[kept]
                active = [active[index] for index in indices]
        if pending:
            _append(*pending, stop_tokens)
    mx.clear_cache()
    return completions


def _prefill(model: Any, prompts: Sequence[Sequence[int]], copies: int) -> list:
    """Caches of all prompts but their last tokens, `copies` of each."""
    require_batchable(model)
    sequences = []
    for prompt in prompts:
        caches = make_cache(model)
        for start in range(0, len(prompt) - 1, PREFILL_STEP_SIZE):
            chunk = prompt[start : min(start + PREFILL_STEP_SIZE, len(prompt) - 1)]
            model(mx.array([chunk]), cache=caches)
            mx.async_eval([cache.state for cache in caches])
        sequences.append(caches)
    merged = merge(sequences)
    if copies > 1:
        indices = mx.array(np.repeat(np.arange(len(prompts)), copies))
        for cache in merged:
            cache.filter(indices)
    return merged


def _sample(
    logits: mx.array, temperature: float, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Tokens [B] and their log-probabilities [B] for logits [B, V]."""
    if temperature:
        logits = logits / temperature
        tokens = mx.random.categorical(logits, key=key)
    else:
        tokens = mx.argmax(logits, axis=-1)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens.astype(mx.int32), chosen - mx.logsumexp(logits, axis=-1)


def _append(
    completions: Sequence[Completion],
    tokens: mx.array,
    logps: mx.array,
    stop_tokens: Collection[int],
) -> None:
    """Append a step's tokens to the completions that have not finished."""
    steps = zip(completions, tokens.tolist(), logps.tolist(), strict=True)
    for completion, token, logp in steps:
        if completion.is_finished:
            continue
        completion.tokens.append(token)
        completion.logps.append(logp)
        completion.is_finished = token in stop_tokens
