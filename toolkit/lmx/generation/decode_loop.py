"""The decode loop: chunked prefill, then asynchronous decoding one step ahead."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from ..errors import nan_predictions
from .kv_cache import CacheState
from .logits_processors import LogitsProcessor
from .sampling import Sampling, make_sampler

CLEAR_CACHE_INTERVAL = 256
"""Steps between releases of MLX's buffer cache, which grows with the context."""


class BatchSampler:
    """Samples the next token of every sequence and tracks their token history.

    Args:
        prompts: complete prompts, including tokens that a cache has already processed.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]]):
        self._sampling, self._prompts = sampling, prompts
        self._sample = make_sampler(sampling)
        self._initialized = False

    def __call__(self, logits: mx.array) -> mx.array:
        """Tokens [B] sampled from logits [B, V]."""
        if not self._initialized:  # the first logits give the vocabulary size
            self._initialized = True
            self._processor = LogitsProcessor.create(self._sampling, logits.shape[-1])
            if self._processor:
                self._counts = self._processor.count_prompts(self._prompts)
        if not self._processor:
            return self._sample(logits)
        tokens = self._sample(self._processor(logits, self._counts))
        self._counts = self._processor.update(self._counts, tokens)
        return tokens


def decode(
    cache: CacheState,
    prompt: Sequence[int],
    max_tokens: int,
    sampler: BatchSampler,
    *,
    prefill_step_size: int,
    logprobs: bool = False,
) -> Iterator[tuple[int, float | None]]:
    """Yield `max_tokens` times the next token of a prompt.

    The second item is its log-probability under the model, or None. While a step is
    consumed, the next step already runs.

    Args:
        cache: may already contain a prefix of the prompt, at most all but its last
            token.

    Raises:
        UserError: the first prediction is NaN.
    """

    def step(
        tokens: mx.array, *, is_first: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        logits = cache.forward(tokens)[:, -1, :]
        if is_first:
            require_numbers(logits, "the model")
        sampled = sampler(logits)
        scores = _logprobs(logits, sampled) if logprobs else None
        mx.async_eval(sampled, scores)
        return sampled, scores

    if not max_tokens:
        return
    with wired_limit():
        tokens = mx.array([prompt])
        prefill(cache, tokens[:, cache.length : -1], step_size=prefill_step_size)
        next_step = step(tokens[:, -1:], is_first=True)
        for n in range(1, max_tokens + 1):
            token, score = next_step
            if n < max_tokens:
                next_step = step(token[:, None])
            yield token.item(), None if score is None else score.item()
            if n % CLEAR_CACHE_INTERVAL == 0:
                mx.clear_cache()


def require_numbers(logits: mx.array, model: str) -> None:
    """Refuse the predictions of a model, such as "the draft model", that are NaN.

    Raises:
        UserError: a logit is NaN.
    """
    if mx.isnan(logits).any().item():
        raise nan_predictions(model)


def prefill(cache: CacheState, tokens: mx.array, *, step_size: int) -> None:
    """Process prompt tokens [B, L] in chunks of `step_size`.

    The logits are never evaluated, so the LM head costs nothing.
    """
    for start in range(0, tokens.shape[1], step_size):
        cache.forward(tokens[:, start : start + step_size])
        cache.evaluate()
        mx.clear_cache()


def _logprobs(logits: mx.array, tokens: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    sampled = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return sampled - mx.logsumexp(logits, axis=-1)


@contextmanager
def wired_limit() -> Iterator[None]:
    """Keep the weights resident on Apple GPUs. Decoding is slow when they page out."""
    if not mx.metal.is_available():
        yield
        return
    previous = mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not change while a step is running
        mx.set_wired_limit(previous)
