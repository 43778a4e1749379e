"""Continuous batching: requests join and leave the batch at any step.

One step decodes a token for every request of the batch and processes one chunk of the
oldest waiting prompt, so that a long prompt does not block the other requests.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..models.loader import make_cache
from .decode_loop import CLEAR_CACHE_INTERVAL, BatchSampler, require_numbers
from .merged_caches import merge, require_batchable
from .sampling import Sampling


@dataclass(eq=False)
class GenerationRequest:
    """A prompt with its generation settings.

    Attributes:
        prompt: token ids, at least one.
        stop_tokens: tokens that end the completion.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Collection[int] = frozenset()


@dataclass(eq=False)
class _Sequence:
    """The state of a request: prompt tokens prefilled, tokens launched and emitted."""

    request: GenerationRequest
    caches: list
    sampler: BatchSampler
    prefilled: int = 0
    launched: int = 0
    emitted: int = 0
    finished: bool = False


class BatchGenerator:
    """Generates completions for many requests; each gets the tokens it gets alone.

    Not thread-safe.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        max_batch_size: requests decoded together; further requests wait in order.
        prefill_step_size: prompt tokens processed between two decode steps.

    Raises:
        UserError: this model cannot be batched.
    """

    def __init__(
        self, model: Any, *, max_batch_size: int = 32, prefill_step_size: int = 512
    ):
        self.model = model
        self.max_batch_size = max_batch_size
        self.prefill_step_size = prefill_step_size
        self._waiting: deque[_Sequence] = deque()
        self._batch: list[_Sequence] = []
        self._caches: list = []
        # The input tokens [B] of the next step; possibly not computed yet.
        self._next_tokens = mx.zeros(0, mx.int32)
        self._in_flight: tuple[list[_Sequence], mx.array] | None = None
        self._steps = 0
        require_batchable(model)

    @property
    def idle(self) -> bool:
        """Whether all requests are finished."""
        return not (self._waiting or self._batch or self._in_flight)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        groups = [self._caches, *(sequence.caches for sequence in self._waiting)]
        return sum(c.nbytes for caches in groups for c in caches if not c.empty())

    def submit(self, request: GenerationRequest) -> None:
        """Add a request to the queue."""
        assert len(request.prompt), "a prompt has at least one token"
        if request.max_tokens > 0:
            sampler = BatchSampler(request.sampling, [request.prompt])
            sequence = _Sequence(request, make_cache(self.model), sampler)
            self._waiting.append(sequence)

    def cancel(self, request: GenerationRequest) -> None:
        """Drop a request; its cache is freed at the next step."""
        for sequence in (*self._waiting, *self._batch):
            if sequence.request is request:
                sequence.finished = True

    def step(self) -> list[tuple[GenerationRequest, int, bool]]:
        """Launch a decode step and return the tokens of the previous one.

        Returns:
            (request, token, whether it is the last) for every unfinished request.
        """
        self._remove_finished()
        self._prefill()
        previous, self._in_flight = self._in_flight, self._launch()
        self._steps += 1
        if self._steps % CLEAR_CACHE_INTERVAL == 0:
            mx.clear_cache()
        return self._collect(*previous) if previous else []

    def _remove_finished(self) -> None:
        self._waiting = deque(s for s in self._waiting if not s.finished)
        active = [
            index
            for index, sequence in enumerate(self._batch)
            if not sequence.finished and sequence.launched < sequence.request.max_tokens
        ]
        if len(active) == len(self._batch):
            return
        self._batch = [self._batch[index] for index in active]
        if not active:
            self._caches, self._next_tokens = [], mx.zeros(0, mx.int32)
            return
        indices = mx.array(active)
        self._next_tokens = self._next_tokens[indices]
        for cache in self._caches:
            cache.filter(indices)

    def _prefill(self) -> None:
        """Process one chunk of the oldest waiting prompt, or several short prompts."""
        budget = self.prefill_step_size
        while self._waiting and budget > 0 and len(self._batch) < self.max_batch_size:
            sequence = self._waiting[0]
            prompt, start = sequence.request.prompt, sequence.prefilled
            chunk = prompt[start : min(start + budget, len(prompt) - 1)]
            if len(chunk):
                self.model(mx.array([chunk]), cache=sequence.caches)
                mx.async_eval([cache.state for cache in sequence.caches])
            sequence.prefilled += len(chunk)
            # A prompt of one token still takes some time.
            budget -= max(1, len(chunk))
            if sequence.prefilled == len(prompt) - 1:
                self._join(self._waiting.popleft())

    def _join(self, sequence: _Sequence) -> None:
        """Add a prefilled sequence to the batch."""
        caches = merge([sequence.caches])
        sequence.caches = []
        if self._batch:
            for batched, cache in zip(self._caches, caches, strict=True):
                batched.extend(cache)
        else:
            self._caches = caches
        self._batch.append(sequence)
        last = mx.array([sequence.request.prompt[-1]], mx.int32)
        self._next_tokens = mx.concatenate([self._next_tokens, last])

    def _launch(self) -> tuple[list[_Sequence], mx.array] | None:
        if not self._batch:
            return None
        logits = self.model(self._next_tokens[:, None], cache=self._caches)[:, -1, :]
        if any(sequence.launched == 0 for sequence in self._batch):
            require_numbers(logits, "the model")
        self._next_tokens = self._sample(logits).astype(mx.int32)
        mx.async_eval(self._next_tokens)
        for sequence in self._batch:
            sequence.launched += 1
        return list(self._batch), self._next_tokens

    def _sample(self, logits: mx.array) -> mx.array:
        """One token [B] per sequence, each with its own settings."""
        if all(sequence.request.sampling == Sampling() for sequence in self._batch):
            return mx.argmax(logits, axis=-1)
        return mx.concatenate(
            [
                sequence.sampler(logits[index : index + 1])
                for index, sequence in enumerate(self._batch)
            ]
        )

    @staticmethod
    def _collect(
        sequences: list[_Sequence], tokens: mx.array
    ) -> list[tuple[GenerationRequest, int, bool]]:
        responses = []
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            if sequence.finished:
                continue
            request = sequence.request
            sequence.emitted += 1
            is_stop = token in request.stop_tokens
            sequence.finished = is_stop or sequence.emitted == request.max_tokens
            responses.append((request, token, sequence.finished))
        return responses
