"""The scheduler: requests wait, start when memory allows, and are prefilled."""

from bisect import insort
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import count
from typing import Any

import mlx.core as mx

from ..cpu.memory import available_memory
from ..errors import WILL_NOT_FIT, UserError
from ..models.lora.multi_lora import BASE, MultiLoRA, multi_lora
from .kv_cache.batch import is_batchable, max_padded_width, takes_padding
from .kv_cache.prefix import PrefixCache
from .kv_cache.sequence import CacheState, KVBits
from .prefill import PASS_TOKENS, PrefillGroup
from .sampler import Sampler
from .sequence import GenerationRequest, RunningSequence, TokenOutput
from .speculative.proposer import MakeProposer

MIN_CHECKED = 4096
"""Fewer tokens take less memory than the model itself."""
HEADROOM = 64
"""Tokens for which a request that starts must have room, beside those it has."""
MIN_SHARED = 32
"""Tokens of a shared prompt from which its window and recurrent states are stored."""
MIN_HEADROOM = 16
"""With room for less, the request that came last is preempted."""


class Scheduler:
    """The requests that wait, by priority and then in order.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        max_batch_size: requests decoded together.
        prefill_step_size: prompt tokens processed in a step.
        prefix_cache: reuses prompt prefixes of earlier requests; None = no reuse.
        make_proposer: see `Engine`.
        kv_bits: as for `CacheState`.
        kv_memory: bytes for the keys and values of the requests that run. None = what
            is available when the first one starts.

    Attributes:
        waiting: in the order in which they start.
        memory: bytes for the requests that run, measured when the first one starts.
        preemptions: how often a request had to give its place to others.
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
        kv_memory: int | None = None,
    ):
        self.model = model
        self.max_batch_size = max_batch_size
        self.prefill_step_size = prefill_step_size
        self.prefix_cache = prefix_cache
        self.make_proposer = make_proposer
        self.kv_bits = kv_bits
        self.kv_memory = kv_memory
        self.waiting: list[RunningSequence] = []
        self.preemptions = 0
        self.memory = 0
        self._orders = count()

    @property
    def adapters(self) -> MultiLoRA:
        """LoRA adapters that requests can name."""
        return multi_lora(self.model)

    @cached_property
    def _empty_cache(self) -> CacheState:
        # With KV bits, the keys of the model are measured: once, not for every request.
        return CacheState(self.model, kv_bits=self.kv_bits)

    @cached_property
    def _max_padded_width(self) -> int:
        return max_padded_width(self._empty_cache)

    @cached_property
    def bytes_per_token(self) -> float:
        """Bytes that every token of a request takes."""
        return self.new_cache().bytes_per_token()

    @cached_property
    def _vocab_size(self) -> int:
        # Only the shape is used, so nothing is computed.
        return self.model(mx.zeros((1, 1), mx.int32)).shape[-1]

    def new_cache(self, adapter: int = BASE) -> CacheState:
        """An empty cache of one sequence, processed with an adapter."""
        cache = self._empty_cache.empty_copy()
        cache.adapter = adapter
        return cache

    def require_memory(self, request: GenerationRequest) -> None:
        """Refuse a request whose keys and values do not fit in memory alone.

        Raises:
            UserError: with the bytes.
        """
        tokens, memory = request.max_length, self.kv_memory or available_memory()
        if tokens < MIN_CHECKED:
            return
        needed = self.bytes_per_token * tokens
        if needed <= memory:
            return
        raise UserError(
            f"the KV cache of {tokens:,} tokens takes {needed / 1e9:,.1f} GB, and "
            f"{memory / 1e9:,.1f} GB of memory are available",
            hint=f"{int(memory / self.bytes_per_token):,} tokens fit: lower "
            "max_tokens, or quantize the cache (kv_bits)",
            code=WILL_NOT_FIT,
        )

    def measure_memory(self) -> None:
        """Set the memory for all requests, when none runs."""
        self.memory = self.kv_memory or available_memory()

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the queue.

        Raises:
            UserError: there is no such adapter.
        """
        adapter = self.adapters.number(request.adapter)
        self._wait(RunningSequence(request, next(self._orders), adapter))

    def preempt(self, sequence: RunningSequence) -> None:
        """Let a request wait again that has left the batch."""
        self.preemptions += 1
        self._wait(sequence)

    def _wait(self, sequence: RunningSequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove_finished(self) -> None:
        """Drop requests that were aborted."""
        self.waiting = [s for s in self.waiting if not s.finished]

    def prefill(
        self, running: Sequence[RunningSequence]
    ) -> tuple[list[TokenOutput], list[RunningSequence]]:
        """Process one chunk of the first waiting prompt, or several short prompts.

        Returns:
            The errors of requests that cannot start, and the requests whose prompts are
            in their caches, but for the last token. Equal prompts share a cache.
        """
        errors, group = (
            [],
            PrefillGroup(
                self.prefix_cache,
                self.prefill_step_size,
                lambda: self._max_padded_width,
            ),
        )
        while (
            self.waiting
            and group.left > 0
            and self._has_room([*running, *group.sequences], self.waiting[0])
        ):
            sequence = self.waiting[0]
            if group.saves(sequence):
                group.process()
            try:
                self._start(sequence, group)
            except UserError as error:
                errors.append(sequence.fail(error))
                self.waiting.pop(0)
                continue
            if group.takes(sequence):
                group.add(self.waiting.pop(0))
            elif group.pending:
                group.process()
            elif group.budget < min(PASS_TOKENS, self.prefill_step_size):
                break  # a chunk would be small
            else:
                group.budget -= self._prefill_chunk(
                    sequence, group.budget, bool(running)
                )
        group.process()
        if group.sequences:
            self._share_prompt(group.sequences[-1])
        return errors, group.sequences

    def _prefill_chunk(
        self, sequence: RunningSequence, budget: int, has_running: bool
    ) -> int:
        """Process the next tokens of a long prompt; returns their number."""
        state, tokens = sequence.state, sequence.tokens
        start, end = state.length, min(state.length + budget, len(tokens) - 1)
        if start < sequence.matched < end:
            # Others begin like this too, so the states after it are stored.
            end = sequence.matched
        state.forward(mx.array([tokens[start:end]]))
        # Between long chunks, memory is kept small unless other requests run.
        is_long = end - start == self.prefill_step_size
        state.evaluate(wait=is_long and not has_running)
        if self.prefix_cache and end == sequence.matched:
            self.prefix_cache.insert(tokens[:end], state)
        return end - start

    def is_short(self, running: Sequence[RunningSequence]) -> bool:
        """Whether memory has no room for the next tokens of all that run."""
        return len(running) > 1 and not self._fits(running, MIN_HEADROOM)

    def _fits(self, sequences: Sequence[RunningSequence], headroom: int) -> bool:
        """Whether these have room for so many more tokens each."""
        lengths = (
            min(len(s.tokens) + headroom, s.request.max_length) for s in sequences
        )
        # Prompts that wait for others of a higher rank are in memory too.
        others = (
            s.state.length for s in self.waiting if s.state and s not in sequences
        )
        return self.bytes_per_token * (sum(lengths) + sum(others)) <= self.memory

    def _has_room(
        self, running: Sequence[RunningSequence], sequence: RunningSequence
    ) -> bool:
        """Whether a request can run beside the others."""
        if not running:
            return True
        return (
            len(running) < self.max_batch_size
            and self._fits([*running, sequence], HEADROOM)
            and is_batchable(self.model)
            and (not self.make_proposer or takes_padding(self.model))
        )

    def _start(self, sequence: RunningSequence, group: PrefillGroup) -> None:
        """Give a request what it needs, at its first step.

        Args:
            group: a request with equal tokens has its state from there.

        Raises:
            UserError: a token of its settings is outside the vocabulary.
        """
        if sequence.sampler is None:
            sequence.sampler = Sampler(
                sequence.request.sampling, sequence.tokens, self._vocab_size
            )
        if sequence.state is None:
            if self.prefix_cache:
                sequence.state, matched = self.prefix_cache.fetch(
                    sequence.tokens, partial(self.new_cache, sequence.adapter)
                )
                is_long = matched >= sequence.state.length + MIN_SHARED
                sequence.matched = matched if is_long else 0
                if not sequence.emitted:
                    sequence.cached_tokens = sequence.state.length
            elif self.make_proposer or not group.equal(sequence):
                sequence.state = self.new_cache(sequence.adapter)
            else:
                return
        elif sequence.proposer or not self.make_proposer:
            return
        if self.make_proposer:
            sequence.proposer = self.make_proposer(sequence.state)
        else:
            # A prefix may have hidden states, which only a drafter reads.
            sequence.state.recorded = None

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Copy the cache of a prompt for the next request, if it has the same one."""
        if not self.waiting or self.make_proposer or self.prefix_cache:
            return
        other, state = self.waiting[0], sequence.state
        if other.has_prompt_of(sequence) and state.length and other.state is None:
            positions, snapshot = state.positions(0, state.length), state.snapshot()
            other.state = self.new_cache(other.adapter)
            other.state.restore(positions, snapshot, state.length)
