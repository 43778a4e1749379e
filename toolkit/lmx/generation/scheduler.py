"""The scheduler: requests wait, start when memory allows, and are prefilled."""

from bisect import insort
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..cpu.memory import available_memory
from ..errors import WILL_NOT_FIT, UserError
from .kv_cache.batch import is_batchable, takes_padding
from .kv_cache.prefix import PrefixCache
from .kv_cache.sequence import CacheState, KVBits
from .sampler import Sampler
from .sequence import GenerationRequest, RunningSequence, TokenOutput
from .speculative.proposer import MakeProposer

MIN_CHECKED = 4096
"""Fewer tokens take less memory than the model itself."""


class Scheduler:
    """The requests that wait, by priority and then in order.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        max_batch_size: requests decoded together.
        prefill_step_size: prompt tokens processed in a step.
        prefix_cache: reuses prompt prefixes of earlier requests; None = no reuse.
        make_proposer: see `Engine`.
        kv_bits, quantized_kv_start: as for `CacheState`. With a start above 0,
            requests are decoded one by one.
        kv_memory: bytes for the keys and values of the requests that run. None = what
            is available when the first one starts.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch_size: int = 32,
        prefill_step_size: int = 512,
        prefix_cache: PrefixCache | None = None,
        make_proposer: MakeProposer | None = None,
        kv_bits: KVBits = None,
        quantized_kv_start: int = 0,
        kv_memory: int | None = None,
    ):
        self.model = model
        self.max_batch_size = max_batch_size
        self.prefill_step_size = prefill_step_size
        self.prefix_cache = prefix_cache
        self.make_proposer = make_proposer
        self.kv_bits = kv_bits
        self.quantized_kv_start = quantized_kv_start
        self.kv_memory = kv_memory
        self.waiting: list[RunningSequence] = []
        self._memory = 0

    @cached_property
    def _empty_cache(self) -> CacheState:
        # A cache with KV bits tries them on the model: once, not for every request.
        return CacheState(
            self.model,
            kv_bits=self.kv_bits,
            quantized_kv_start=self.quantized_kv_start,
        )

    @cached_property
    def _bytes_per_token(self) -> float:
        return self.new_cache().bytes_per_token()

    @cached_property
    def _vocab_size(self) -> int:
        # Only the shape is used, so nothing is computed.
        return self.model(mx.zeros((1, 1), mx.int32)).shape[-1]

    def new_cache(self) -> CacheState:
        """An empty cache of one sequence."""
        return self._empty_cache.empty_copy()

    def require_memory(self, request: GenerationRequest) -> None:
        """Refuse a request whose keys and values do not fit in memory alone.

        Raises:
            UserError: with the bytes.
        """
        tokens, memory = request.max_length, self.kv_memory or available_memory()
        if tokens < MIN_CHECKED or (needed := self._bytes(request)) <= memory:
            return
        raise UserError(
            f"the KV cache of {tokens:,} tokens takes {needed / 1e9:,.1f} GB, and "
            f"{memory / 1e9:,.1f} GB of memory are available",
            hint=f"{int(memory / self._bytes_per_token):,} tokens fit: lower "
            "max_tokens, or quantize the cache (kv_bits)",
            code=WILL_NOT_FIT,
        )

    def measure_memory(self) -> None:
        """Set the memory for all requests, when none runs."""
        self._memory = self.kv_memory or available_memory()

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the queue."""
        insort(self.waiting, RunningSequence(request), key=lambda s: s.request.priority)

    def remove_finished(self) -> None:
        """Drop requests that were aborted."""
        self.waiting = [s for s in self.waiting if not s.finished]

    def prefill(
        self, running: Sequence[RunningSequence]
    ) -> tuple[list[TokenOutput], list[RunningSequence]]:
        """Process one chunk of the first waiting prompt, or several short prompts.

        Returns:
            The errors of requests that cannot start, and the requests whose prompts are
            in their caches, but for the last token.
        """
        budget, errors, ready = self.prefill_step_size, [], []
        if not self.waiting:
            return errors, ready
        reserved = sum(self._bytes(sequence.request) for sequence in running)
        while (
            self.waiting
            and budget > 0
            and self._has_room(len(running) + len(ready), reserved)
        ):
            sequence = self.waiting[0]
            try:
                self._start(sequence)
            except UserError as error:
                errors.append(sequence.fail(error))
                self.waiting.pop(0)
                continue
            prompt, start = sequence.request.prompt, sequence.prefilled
            chunk = prompt[start : min(start + budget, len(prompt) - 1)]
            if len(chunk):
                sequence.state.forward(mx.array([chunk]))
                # Rows that run wait for nothing; without them, memory is kept small.
                sequence.state.evaluate(wait=not running)
            sequence.prefilled += len(chunk)
            # A prompt of one token still takes some time.
            budget -= max(1, len(chunk))
            if sequence.prefilled == len(prompt) - 1:
                ready.append(self.waiting.pop(0))
                if self.waiting:
                    reserved += self._bytes(sequence.request)
                self._share_prompt(sequence)
        return errors, ready

    def _has_room(self, running: int, reserved: float) -> bool:
        """Whether the next request can run beside the others to its last token.

        Args:
            running, reserved: the number of the others, and the bytes they may need.
        """
        if not running:
            return True
        return (
            running < self.max_batch_size
            and not self.quantized_kv_start
            and reserved + self._bytes(self.waiting[0].request) <= self._memory
            and is_batchable(self.model)
            and (not self.make_proposer or takes_padding(self.model))
        )

    def _bytes(self, request: GenerationRequest) -> float:
        return self._bytes_per_token * request.max_length

    def _start(self, sequence: RunningSequence) -> None:
        """Give a request what it needs, at its first step.

        Raises:
            UserError: a token of its settings is outside the vocabulary.
        """
        if sequence.sampler is not None:
            return
        sequence.sampler = Sampler(
            sequence.request.sampling, sequence.tokens, self._vocab_size
        )
        if sequence.state is not None:
            return
        if self.prefix_cache:
            prompt = sequence.request.prompt
            sequence.state, _ = self.prefix_cache.fetch(prompt, self.new_cache)
        else:
            sequence.state = self.new_cache()
        sequence.prefilled = sequence.state.length
        if self.make_proposer:
            sequence.proposer = self.make_proposer(sequence.state)
        else:
            # A prefix may have hidden states, which only a drafter reads.
            sequence.state.recorded = None

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Copy the cache of a prompt for the next request, if it has the same one."""
        if not self.waiting or self.make_proposer:
            return
        other = self.waiting[0]
        if other.request.prompt is sequence.request.prompt and other.state is None:
            other.state = self.new_cache()
            other.state.restore(sequence.state.state, sequence.state.length)
            other.prefilled = sequence.prefilled
