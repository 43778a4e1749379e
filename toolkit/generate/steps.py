"""The decoding loop: chunked prefill, then one step always in flight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..model.load import make_cache
from .sampling import Sampler

CLEAR_EVERY = 256
"""Steps between releases of MLX's buffer cache, which grows with the context."""


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampler: Sampler,
    *,
    prefill_step: int,
    logprobs: bool = False,
) -> Iterator[tuple[mx.array, mx.array | None]]:
    """Yield `count` times the next tokens [B] of B prompts of one length.

    With them come their log-probabilities [B] under the model, if asked for. When a
    step is yielded the next one already runs; the last step starts no other.
    """

    def step(tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        logits = model(tokens, cache=cache)[:, -1, :]
        chosen = sampler(logits)
        scores = _logprobs(logits, chosen) if logprobs else None
        mx.async_eval(chosen, scores)
        return chosen, scores

    if not count:
        return
    with _wired_memory():
        tokens, cache = mx.array(prompts), make_cache(model)
        prefill(model, tokens[:, :-1], cache, width=prefill_step // len(prompts))
        ahead = step(tokens[:, -1:])
        for number in range(1, count + 1):
            now = ahead
            if number < count:
                ahead = step(now[0][:, None])
            yield now
            if number % CLEAR_EVERY == 0:
                mx.clear_cache()


def prefill(model: Any, tokens: mx.array, cache: list, *, width: int) -> None:
    """Fill the cache from tokens [B, L], `width` columns at a time.

    The logits are never evaluated, so the output head costs nothing here.
    """
    width = max(1, width)
    for start in range(0, tokens.shape[1], width):
        model(tokens[:, start : start + width], cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()


def _logprobs(logits: mx.array, tokens: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - mx.logsumexp(logits, axis=-1)


@contextmanager
def _wired_memory():
    """Keep the weights resident on Apple GPUs: paged out, decoding crawls."""
    if not mx.metal.is_available():
        yield
        return
    before = mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not change under a step in flight
        mx.set_wired_limit(before)
