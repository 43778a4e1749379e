"""The decoding loop: chunked prefill, then one step always in flight."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from .kv_cache import CacheState
from .logits_processors import LogitsProcessor
from .sampling import Sampling, make_sampler

CLEAR_CACHE_INTERVAL = 256
"""Steps between releases of MLX's buffer cache, which grows with the context."""


class BatchSampler:
    """Chooses the next tokens of some rows, which it remembers.

    Args:
        prompts: of the rows, whole, whatever of them a session has read already.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]]):
        self._sampling, self._prompts = sampling, prompts
        self._sample = make_sampler(sampling)
        self._begun = False

    def __call__(self, logits: mx.array) -> mx.array:
        """Tokens [B] by logits [B, V]."""
        if not self._begun:
            self._begin(logits.shape[-1])
        if not self._adjust:
            return self._sample(logits)
        tokens = self._sample(self._adjust(logits, self._counts))
        self._counts = self._adjust.count(self._counts, tokens)
        return tokens

    def _begin(self, vocabulary: int) -> None:
        """How many tokens there are is known with the first logits."""
        self._begun = True
        self._adjust = LogitsProcessor.needed(self._sampling, vocabulary)
        if self._adjust:
            self._counts = self._adjust.begin(self._prompts)


def decode(
    session: CacheState,
    prompts: Sequence[Sequence[int]],
    count: int,
    choose: BatchSampler,
    *,
    prefill_step_size: int,
    logprobs: bool = False,
) -> Iterator[tuple[mx.array, mx.array | None]]:
    """Yield `count` times the next tokens [B] of B prompts of one length.

    With them come their log-probabilities [B] under the model, if asked for. When a
    step is yielded the next one already runs; the last step starts no other.

    Args:
        session: may have read all but the last token of the prompts, or less.
    """

    def step(tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        logits = session.forward(tokens)[:, -1, :]
        chosen = choose(logits)
        scores = _logprobs(logits, chosen) if logprobs else None
        mx.async_eval(chosen, scores)
        return chosen, scores

    if not count:
        return
    with wired_limit():
        tokens = mx.array(prompts)
        unread = tokens[:, session.length : -1]
        prefill(session, unread, width=prefill_step_size // len(prompts))
        ahead = step(tokens[:, -1:])
        for number in range(1, count + 1):
            now = ahead
            if number < count:
                ahead = step(now[0][:, None])
            yield now
            if number % CLEAR_CACHE_INTERVAL == 0:
                mx.clear_cache()


def prefill(session: CacheState, tokens: mx.array, *, width: int) -> None:
    """Read tokens [B, L], `width` columns at a time.

    The logits are never evaluated, so the output head costs nothing here.
    """
    width = max(1, width)
    for start in range(0, tokens.shape[1], width):
        session.forward(tokens[:, start : start + width])
        session.evaluate()
        mx.clear_cache()


def _logprobs(logits: mx.array, tokens: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - mx.logsumexp(logits, axis=-1)


@contextmanager
def wired_limit() -> Iterator[None]:
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
