"""The scheduler: it decides what a step of the engine does, and runs no model."""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from ..cpu.memory import available_memory
from ..errors import WILL_NOT_FIT, UserError
from .kv_cache.prefix import PrefixCache
from .model_facts import ModelFacts
from .prefill import PASS_TOKENS, PrefillGroup, PrefillPass
from .sampler import Sampler
from .sequence import GenerationRequest, RunningSequence, TokenOutput
from .speculative.draft_length import DraftLengthController, DraftPlanner
from .speculative.proposer import MakeProposer

MIN_CHECKED = 4096
"""Fewer tokens take less memory than the model itself."""
HEADROOM = 64
"""Tokens for which a request that starts must have room, beside those it has."""
MIN_SHARED = 32
"""Tokens of a shared prompt from which its window and recurrent states are stored."""
MIN_HEADROOM = 16
"""With room for less, the request that came last is preempted."""


@dataclass(frozen=True)
class PrefillPlan:
    """What a step does with the requests that wait.

    Attributes:
        passes: over their prompts. The next one is planned when one has run: it may
            find the prefix that this one has stored.
        errors: of requests that cannot start, when all passes have run.
    """

    passes: Iterator[PrefillPass]
    errors: list[TokenOutput]


class Scheduler:
    """The requests that wait, by priority and then in order, and those that run.

    Args:
        facts: of the model.
        max_batch_size: requests decoded together.
        prefill_step_size: prompt tokens processed in a step.
        prefix_cache: reuses prompt prefixes of earlier requests; None = no reuse.
        make_proposer, draft_length: see `Engine`.
        kv_memory: bytes for the keys and values of the requests that run. None = what
            is available when the first one starts.

    Attributes:
        waiting: in the order in which they start.
        running: by row of the batch.
        memory: bytes for the requests that run, measured when the first one starts.
        preemptions: how often a request had to give its place to others.
        has_drafts: whether requests have a proposer.
        drafts: decides when they get draft tokens.
    """

    def __init__(
        self,
        facts: ModelFacts,
        *,
        max_batch_size: int = 32,
        prefill_step_size: int = 512,
        prefix_cache: PrefixCache | None = None,
        make_proposer: MakeProposer | None = None,
        draft_length: DraftLengthController | None = None,
        kv_memory: int | None = None,
    ):
        self.facts = facts
        self.max_batch_size = max_batch_size
        self.prefill_step_size = prefill_step_size
        self.prefix_cache = prefix_cache
        self.drafts = DraftPlanner(draft_length or DraftLengthController())
        self.kv_memory = kv_memory
        self.waiting: list[RunningSequence] = []
        self.running: list[RunningSequence] = []
        self.preemptions = 0
        self.memory = 0
        self.has_drafts = make_proposer is not None
        self._make_proposer = make_proposer
        self._orders = count()

    @property
    def sequences(self) -> list[RunningSequence]:
        """All requests."""
        return [*self.waiting, *self.running]

    def require_memory(self, request: GenerationRequest) -> None:
        """Refuse a request whose keys and values do not fit in memory alone.

        Raises:
            UserError: with the bytes.
        """
        tokens, memory = request.max_length, self.kv_memory or available_memory()
        if tokens < MIN_CHECKED:
            return

        def needed(count: int) -> float:
            in_prompt = min(count, len(request.prompt))
            prompt = self.facts.cache_bytes(in_prompt, in_prompt=True)
            return max(prompt, self.facts.cache_bytes(count))

        if needed(tokens) <= memory:
            return
        fitting = bisect_right(range(tokens), memory, key=needed) - 1
        raise UserError(
            f"the KV cache of {tokens:,} tokens takes {needed(tokens) / 1e9:,.1f} GB, "
            f"and {memory / 1e9:,.1f} GB of memory are available",
            hint=f"{max(0, fitting):,} tokens fit: lower max_tokens, or quantize the "
            "cache (kv_bits), or limit it (max_kv_size)",
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
        adapter = self.facts.adapters.number(request.adapter)
        self._wait(RunningSequence(request, next(self._orders), adapter))

    def remove(self, row: int) -> RunningSequence:
        """Take a request out of the batch; the last row takes its place."""
        sequence, self.running[row] = self.running[row], self.running[-1]
        self.running.pop()
        return sequence

    def remove_aborted(self) -> None:
        """Drop waiting requests that were aborted."""
        self.waiting = [s for s in self.waiting if not s.finished]

    def clear(self) -> None:
        """Drop all requests."""
        for sequence in self.sequences:
            sequence.close()
        self.waiting, self.running = [], []

    def is_short(self) -> bool:
        """Whether memory has no room for the next tokens of all that run."""
        return len(self.running) > 1 and not self._fits(self.running, MIN_HEADROOM)

    def preempt(self) -> int:
        """Let the last request wait again; returns its row, which must be removed."""
        self.preemptions += 1
        row = max(range(len(self.running)), key=lambda r: self.running[r].rank)
        self._wait(self.running[row])
        return row

    def plan_prefill(self) -> PrefillPlan:
        """Plan what the step does with waiting requests.

        Some of them run when all passes have run. Equal prompts share a cache then.
        """
        errors: list[TokenOutput] = []
        return PrefillPlan(self._passes(errors), errors)

    def tries_drafts(self) -> bool:
        """Whether this step may be a round of draft tokens."""
        if not (self.has_drafts and self.running):
            return False
        has_draft = any(s.draft is not None for s in self.running)
        return self.drafts.tries(len(self.running), has_draft=has_draft)

    def draft_limits(self) -> list[int]:
        """The most draft tokens of every row in the next round."""
        length = self.drafts.length(len(self.running))
        # The target adds one token to them.
        return [max(0, min(length, s.remaining - 1)) for s in self.running]

    def _wait(self, sequence: RunningSequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def _passes(self, errors: list[TokenOutput]) -> Iterator[PrefillPass]:
        """One chunk of the first waiting prompt, or several short prompts."""
        size = self.prefill_step_size
        group = PrefillGroup(
            self.prefix_cache, size, lambda: self.facts.max_padded_width
        )
        while self.waiting and group.left > 0 and self._has_room(group.sequences):
            sequence = self.waiting[0]
            if group.saves(sequence):
                yield from group.passes()
            try:
                self._start(sequence, group)
            except UserError as error:
                errors.append(sequence.fail(error))
                self.waiting.pop(0)
                continue
            if group.takes(sequence):
                group.add(self.waiting.pop(0))
            elif group.pending:
                yield from group.passes()
            elif group.budget < min(PASS_TOKENS, size):
                break  # a chunk would be small
            else:
                start, last = sequence.state.length, len(sequence.tokens) - 1
                end = min(start + group.budget, last)
                # Others begin like this too, so the states after it are stored.
                for cut in (sequence.matched, sequence.selected_at):
                    end = cut if start < cut < end else end
                group.budget -= end - start
                # Between long chunks, memory is kept small unless other requests run.
                waits = end - start == size and not self.running
                yield PrefillPass([sequence], [end], waits)
        yield from group.passes()
        if group.sequences:
            self._share_prompt(group.sequences[-1])
            self.running += group.sequences
            self.drafts.joined()

    def _fits(self, sequences: Sequence[RunningSequence], headroom: int) -> bool:
        """Whether these have room for so many more tokens each."""
        size, total = self.facts.cache_bytes, 0.0
        for s in sequences:
            length = min(len(s.tokens) + headroom, s.request.max_length)
            prompt = 0 if s in self.running else len(s.request.prompt)
            total += max(size(length), size(prompt, in_prompt=True))
        # Prompts that wait for others of a higher rank are in memory too.
        for s in self.waiting:
            if s.state and s not in sequences:
                total += size(s.state.length, in_prompt=True)
        return total <= self.memory

    def _has_room(self, starting: Sequence[RunningSequence]) -> bool:
        """Whether the first request that waits can run beside the others."""
        others = [*self.running, *starting]
        if not others:
            return True
        return (
            len(others) < self.max_batch_size
            and self._fits([*others, self.waiting[0]], HEADROOM)
            and self.facts.takes_batches(padded=self.has_drafts)
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
                sequence.request.sampling, sequence.tokens, self.facts.vocab_size
            )
        if sequence.state is None:
            tokens = sequence.tokens
            if self.facts.selects:
                count = self.facts.kv_limit.reusable(len(sequence.request.prompt))
                tokens = tokens[:count]
                sequence.selected_at = sequence.prompt_end if sequence.emitted else 0
            if sequence.scores_prompt:
                sequence.state = self.facts.new_cache(sequence.adapter)
            elif self.prefix_cache:
                sequence.state, matched = self.prefix_cache.fetch(
                    tokens, partial(self.facts.new_cache, sequence.adapter)
                )
                is_long = matched >= sequence.state.length + MIN_SHARED
                sequence.matched = matched if is_long else 0
                if not sequence.emitted:
                    sequence.cached_tokens = sequence.state.length
            elif self._make_proposer or not group.equal(sequence):
                sequence.state = self.facts.new_cache(sequence.adapter)
            else:
                return
        elif sequence.proposer or not self._make_proposer:
            return
        if self._make_proposer:
            sequence.proposer = self._make_proposer(sequence.state)
        else:
            # A prefix may have hidden states, which only a drafter reads.
            sequence.state.recorded = None

    def _share_prompt(self, sequence: RunningSequence) -> None:
        """Copy the cache of a prompt for the next request, if it has the same one."""
        # Of a prompt whose queries are observed, they would be missing.
        has_more = self._make_proposer or self.facts.selects
        if not self.waiting or has_more or self.prefix_cache:
            return
        other, state = self.waiting[0], sequence.state
        if other.has_prompt_of(sequence) and state.length and other.state is None:
            positions, snapshot = state.positions(0, state.length), state.snapshot()
            other.state = self.facts.new_cache(other.adapter)
            other.state.restore(positions, snapshot, state.length)
