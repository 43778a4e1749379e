"""Many requests at once: each joins and leaves the batch at any step.

One step decodes a token for every request in the batch and reads a part of the prompt
of the one that waits longest, so that a long prompt holds nobody up for long.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..models.loader import make_cache
from .decode_loop import CLEAR_CACHE_INTERVAL, BatchSampler
from .sampling import Sampling


@dataclass(eq=False)
class GenerationRequest:
    """A prompt and how it is answered.

    Attributes:
        prompt: tokens, at least one.
        stop_tokens: those that end the answer.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: Collection[int] = frozenset()


@dataclass(eq=False)
class _Sequence:
    """A request on its way."""

    request: GenerationRequest
    caches: list
    choose: BatchSampler
    read: int = 0
    launched: int = 0
    said: int = 0
    done: bool = False


class BatchGenerator:
    """Answers requests together, each as if it were alone.

    Not safe for use by several threads.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        rows: requests decoded together at most; the others wait in order.
        prefill_step_size: tokens of a prompt that are read between two steps.

    Raises:
        UserError: a cache of this model cannot hold several requests.
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
        # Tokens [B] that the batch reads next; they may still be on their way.
        self._next = mx.zeros(0, mx.int32)
        self._ahead: tuple[list[_Sequence], mx.array] | None = None
        self._steps = 0
        for cache in make_cache(model):
            if not hasattr(type(cache), "merge"):
                raise UserError(
                    f"several requests do not fit into one {type(cache).__name__}",
                    hint="answer them one after the other",
                )

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self._waiting or self._batch or self._ahead)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        parts = [self._caches, *(row.caches for row in self._waiting)]
        return sum(c.nbytes for caches in parts for c in caches if not c.empty())

    def submit(self, request: GenerationRequest) -> None:
        """Let a request wait for its turn."""
        assert len(request.prompt), "a prompt has at least one token"
        if request.max_tokens > 0:
            choose = BatchSampler(request.sampling, [request.prompt])
            row = _Sequence(request, make_cache(self.model), choose)
            self._waiting.append(row)

    def cancel(self, request: GenerationRequest) -> None:
        """Forget a request; its cache is freed at the next step."""
        for row in (*self._waiting, *self._batch):
            if row.request is request:
                row.done = True

    def step(self) -> list[tuple[GenerationRequest, int, bool]]:
        """Decode one token for every request of the batch.

        Returns:
            Of every request that has one: a token, and whether it is the last. Those
            of the step before: while they are read, this one already runs.
        """
        self._leave()
        self._prefill()
        ahead, self._ahead = self._ahead, self._launch()
        self._steps += 1
        if self._steps % CLEAR_CACHE_INTERVAL == 0:
            mx.clear_cache()
        return self._tokens(*ahead) if ahead else []

    def _leave(self) -> None:
        self._waiting = deque(row for row in self._waiting if not row.done)
        stay = [
            number
            for number, row in enumerate(self._batch)
            if not row.done and row.launched < row.request.max_tokens
        ]
        if len(stay) == len(self._batch):
            return
        self._batch = [self._batch[number] for number in stay]
        if not stay:
            self._caches, self._next = [], mx.zeros(0, mx.int32)
            return
        kept = mx.array(stay)
        self._next = self._next[kept]
        for cache in self._caches:
            cache.filter(kept)

    def _prefill(self) -> None:
        """Read a part of the first prompt that waits; of short ones, several."""
        room = self.prefill_step_size
        while self._waiting and room > 0 and len(self._batch) < self.max_batch_size:
            row = self._waiting[0]
            prompt = row.request.prompt
            part = prompt[row.read : min(row.read + room, len(prompt) - 1)]
            if len(part):
                self.model(mx.array([part]), cache=row.caches)
                mx.async_eval([cache.state for cache in row.caches])
            row.read += len(part)
            # Even the shortest prompt takes some time.
            room -= max(1, len(part))
            if row.read == len(prompt) - 1:
                self._join(self._waiting.popleft())

    def _join(self, row: _Sequence) -> None:
        alone = [type(cache).merge([cache]) for cache in row.caches]
        row.caches = []
        if self._batch:
            for cache, other in zip(self._caches, alone, strict=True):
                cache.extend(other)
        else:
            self._caches = alone
        self._batch.append(row)
        last = mx.array([row.request.prompt[-1]], mx.int32)
        self._next = mx.concatenate([self._next, last])

    def _launch(self) -> tuple[list[_Sequence], mx.array] | None:
        if not self._batch:
            return None
        logits = self.model(self._next[:, None], cache=self._caches)[:, -1, :]
        self._next = self._chosen(logits).astype(mx.int32)
        mx.async_eval(self._next)
        for row in self._batch:
            row.launched += 1
        return list(self._batch), self._next

    def _chosen(self, logits: mx.array) -> mx.array:
        """A token [B] for every row, by its own settings."""
        if all(row.request.sampling == Sampling() for row in self._batch):
            return mx.argmax(logits, axis=-1)
        parts = [
            row.choose(logits[number : number + 1])
            for number, row in enumerate(self._batch)
        ]
        return mx.concatenate(parts)

    @staticmethod
    def _tokens(
        rows: list[_Sequence], tokens: mx.array
    ) -> list[tuple[GenerationRequest, int, bool]]:
        found = []
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if row.done:
                continue
            row.said += 1
            ends = token in row.request.stop_tokens
            row.done = ends or row.said == row.request.max_tokens
            found.append((row.request, token, row.done))
        return found
