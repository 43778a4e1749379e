"""The engine: it runs every forward pass with a cache, for one request or many.

The scheduler decides what a step does. A step prefills a chunk of a waiting prompt, or
several short ones, and decodes a token of every running request, or a round of draft
tokens. So a long prompt does not block the others.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..errors import UserError, nan_predictions
from ..models.lora.multi_lora import MultiLoRA
from .grammar_matcher import allow_only
from .kv_cache.batch import CacheBatch, OneRow, join, padded
from .kv_cache.eviction import KVLimit
from .kv_cache.prefix import PrefixCache
from .kv_cache.sequence import KVBits
from .logprobs import prompt_logprobs, token_logprobs
from .model_facts import ModelFacts
from .prefill import PrefillPass
from .sampler import sample_rows
from .scheduler import Scheduler
from .sequence import NO_LOGPROBS, GenerationRequest, RunningSequence, TokenOutput
from .speculative.draft_length import SpeculativeStats
from .speculative.proposer import NO_DRAFT, DraftRequest, accepted_tokens, propose

CLEAR_CACHE_INTERVAL = 256
"""Steps between releases of MLX's buffer cache, which grows with the context."""


class Engine:
    """Generates the completions of requests that are added at any time.

    A request gets the tokens that it gets alone. Not thread-safe.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        kv_bits, kv_limit: as for `CacheState`.
        options: those of `Scheduler`. `make_proposer` makes a proposer of draft tokens
            for every request from its cache, for speculative decoding. `draft_length`
            chooses the number of draft tokens for one request; batches get their own
            like it.

    Attributes:
        new_cache: see `ModelFacts.new_cache`.
        require_memory: see `Scheduler.require_memory`.
        max_batch_size: requests that are decoded together at most.
        beat_seconds: after which an engine without requests takes a step; None = never.
    """

    beat_seconds: float | None = None

    def __init__(
        self,
        model: Any,
        *,
        kv_bits: KVBits = None,
        kv_limit: KVLimit | None = None,
        **options: Any,
    ):
        self.model, self._facts = model, ModelFacts(model, kv_bits, kv_limit)
        self.scheduler = Scheduler(self._facts, **options)
        self.new_cache = self._facts.new_cache
        self.max_batch_size = self.scheduler.max_batch_size
        self.require_memory = self.scheduler.require_memory
        self._rows: OneRow | CacheBatch | None = None
        self._next_tokens = mx.zeros(0, mx.int32)
        self._in_flight: tuple | None = None
        self._has_warned = False  # of a broken draft model
        self._launch_seconds = 0.0
        self._steps = 0

    @property
    def idle(self) -> bool:
        """Whether all requests are finished."""
        return not (self.scheduler.sequences or self._in_flight)

    @property
    def stats(self) -> SpeculativeStats:
        """Counts of speculative decoding."""
        return self.scheduler.drafts.stats

    def reset_stats(self) -> None:
        """Count from zero."""
        self.scheduler.drafts.stats = SpeculativeStats()

    @property
    def adapters(self) -> MultiLoRA:
        """LoRA adapters that requests can name."""
        return self._facts.adapters

    @property
    def prefixes(self) -> PrefixCache | None:
        """Prefixes of earlier requests, if they are kept."""
        return self.scheduler.prefix_cache

    @contextmanager
    def sharing_prefixes(self) -> Iterator[None]:
        """Process what prompts have in common once, also if prefixes are not kept."""
        kept = self.prefixes
        self.scheduler.prefix_cache = kept or PrefixCache()
        try:
            yield
        finally:
            # The weights may be others later.
            self.scheduler.prefix_cache = kept

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or not ended their prompts."""
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Requests that are decoded."""
        return len(self.scheduler.running)

    @property
    def preemptions(self) -> int:
        """How often a request had to give its place to others."""
        return self.scheduler.preemptions

    @property
    def memory(self) -> int:
        """Bytes that the requests may have."""
        return self.scheduler.memory

    @property
    def nbytes(self) -> int:
        """Bytes of all caches of requests."""
        states = [s.state for s in self.scheduler.waiting if s.state]
        return sum(x.nbytes for x in [*states, *([self._rows] if self._rows else [])])

    def add_request(self, request: GenerationRequest) -> None:
        """Add a request to the queue."""
        assert len(request.prompt), "a prompt has at least one token"
        if request.max_tokens < 1:
            return
        if self.idle:
            self.scheduler.measure_memory()
        self.scheduler.add(request)

    def close(self) -> None:
        """Keep prefixes on the disk, if there is one; let other processes end."""
        if self.prefixes:
            self.prefixes.save()

    def remove_adapter(self, name: str) -> None:
        """Free an adapter, and the prefixes that were processed with it.

        Raises:
            UserError: there is none of this name, or requests have it.
        """
        number = self.adapters.number(name)
        if any(each.adapter == number for each in self.scheduler.sequences):
            raise UserError(f"requests are running with the adapter {name!r}")
        self.adapters.remove(name)
        if self.prefixes:
            self.prefixes.drop(number)

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request, at any time between two steps."""
        for sequence in self.scheduler.sequences:
            if sequence.request is request:
                sequence.finished = True
        if all(sequence.finished for sequence in self.scheduler.sequences):
            self._in_flight = None
            self._remove_finished()
            self._rest()

    def step(self) -> list[TokenOutput]:
        """One step of all requests.

        Returns:
            The next tokens of running requests, in order; several for a request whose
            draft tokens were accepted. While they are read, the next step already runs.
        """
        try:
            outputs = self._step()
        except BaseException:
            # Layers of the caches may have different lengths.
            self.scheduler.clear()
            self._in_flight = None
            self._rest()
            raise
        if self.idle:
            self._rest()
        return outputs

    def run(self, requests: Sequence[GenerationRequest]) -> Iterator[TokenOutput]:
        """The outputs of requests until all have ended, in the order of the steps.

        Raises:
            UserError: a request failed.
        """
        for request in requests:
            self.add_request(request)
        while not self.idle:
            for output in self.step():
                if output.error:
                    raise output.error
                yield output

    def _step(self) -> list[TokenOutput]:
        self._remove_finished()
        outputs = self._preempt()
        started = len(self.scheduler.running)
        plan = self.scheduler.plan_prefill()
        for each in plan.passes:
            self._prefill(each)
        outputs += plan.errors
        for sequence in self.scheduler.running[started:]:
            self._join(sequence)
        self._steps += 1
        if self._steps % CLEAR_CACHE_INTERVAL == 0:
            mx.clear_cache()
        if self.scheduler.tries_drafts():
            outputs += self._collect()
            self._remove_finished()
            start = time.perf_counter()
            if self._propose():
                self._launch_seconds += time.perf_counter() - start
                return outputs + self._round()
        return outputs + self._standard_step()

    def _rest(self) -> None:
        self._rows, self._next_tokens = None, mx.zeros(0, mx.int32)

    # Rows

    def _remove_finished(self) -> None:
        """Take requests out that are finished or whose last token is launched."""
        self.scheduler.remove_aborted()
        for row in reversed(range(self.num_running)):
            sequence = self.scheduler.running[row]
            is_launched = sequence.launched >= sequence.request.max_tokens
            if sequence.finished or is_launched:
                self._leave(row)

    def _leave(self, row: int) -> None:
        """Take a request out of the batch. Its prefix is kept."""
        sequence = self.scheduler.remove(row)
        sequence.close()
        if self.prefixes and not sequence.failed:
            length = min(self._rows.lengths[row], len(sequence.tokens))
            state = self._rows.extract(row)
            if not state.has_selected and state.trim(state.length - length):
                self.prefixes.insert(sequence.tokens[:length], state)
        if not (last := self.num_running):
            self._rows, self._next_tokens = None, mx.zeros(0, mx.int32)
            return
        self._rows.leave(row)
        order = [*range(last)]
        if row < last:
            order[row] = last
        self._next_tokens = self._next_tokens[mx.array(order)]

    def _preempt(self) -> list[TokenOutput]:
        """Let the last requests wait again while memory is short.

        Their keys and values are dropped, and computed again when they go on.

        Returns:
            The tokens of the step in flight, if one had to go.
        """
        outputs = []
        while self.scheduler.is_short():
            outputs += self._collect()
            self._remove_finished()
            if self.scheduler.is_short():
                self._leave(self.scheduler.preempt())
        return outputs

    def _prefill(self, prompts: PrefillPass) -> None:
        """Process prompts, and keep those that end and what others begin with."""
        rows = None
        pairs = [*zip(prompts.sequences, prompts.ends, strict=True)]
        for sequence in prompts.sequences:
            if sequence.emitted and sequence.state.length == sequence.prompt_end:
                sequence.state.end_prompt()
            rows = join(rows, sequence.state)
        starts = [sequence.state.length for sequence in prompts.sequences]
        places = zip(starts, pairs, strict=True)
        tokens, counts = padded([s.tokens[at:end] for at, (s, end) in places])
        logits = rows.forward(tokens, counts if len(counts) > 1 else None)
        for row, (sequence, end) in enumerate(pairs):
            if sequence.scores_prompt:
                own, start = logits[row : row + 1, : counts[row]], starts[row]
                sequence.prompt_logprobs += prompt_logprobs(sequence, own, start)
            sequence.state = state = rows.extract(row)
            state.evaluate(wait=prompts.waits)
            is_end = end in (sequence.matched, len(sequence.tokens) - 1)
            if self.prefixes and is_end and not state.has_selected:
                self.prefixes.insert(sequence.tokens[:end], state)

    def _join(self, sequence: RunningSequence) -> None:
        """Add a prefilled request to the batch."""
        sequence.state.end_prompt()
        self._rows = join(self._rows, sequence.state)
        sequence.state, sequence.launched = None, sequence.emitted
        last = mx.array([sequence.tokens[-1]], mx.int32)
        self._next_tokens = mx.concatenate([self._next_tokens, last])

    # Standard steps

    def _standard_step(self) -> list[TokenOutput]:
        """Launch a step of all rows, and read the tokens of the one before."""
        start = time.perf_counter()
        previous, self._in_flight = self._in_flight, None
        outputs = []
        # What a grammar allows depends on the last token, so that is read first.
        has_grammar = self._has_grammar
        if not has_grammar:
            self._in_flight = self._launch()
        if previous:
            outputs = self._collect(previous)
        if has_grammar:
            self._remove_finished()
            self._in_flight = self._launch()
        if previous and self.scheduler.has_drafts:
            seconds = time.perf_counter() - start
            self.scheduler.drafts.time_step(self.num_running, seconds)
        return outputs

    def _launch(self) -> tuple | None:
        """Launch a step of all rows, without waiting for the one before."""
        sequences = list(self.scheduler.running)
        if not sequences:
            return None
        logits = self._rows.forward(self._next_tokens[:, None])
        is_nan = mx.isnan(logits).any(axis=(1, 2)) if self._is_first else None
        positions = [len(s.request.prompt) + s.launched for s in sequences]
        samplers = [sequence.sampler for sequence in sequences]
        if self._has_grammar:
            mx.async_eval(logits)  # they are computed while the masks are
            for sequence in sequences:
                sequence.mask_draft([])
        allowed = self._allowed(logits)
        tokens = sample_rows(samplers, allowed, positions)
        logprobs = token_logprobs(sequences, logits, allowed, tokens)
        mx.async_eval(tokens, logprobs and logprobs.arrays, is_nan)
        self._next_tokens = tokens[:, 0]
        for row, sequence in enumerate(sequences):
            sequence.launched += 1
            if sequence.sampler.has_counts:
                sequence.sampler.advance(tokens[row])
        return sequences, tokens, logprobs, is_nan

    @property
    def _is_first(self) -> bool:
        """Whether a request gets its first prediction."""
        return any(sequence.launched == 0 for sequence in self.scheduler.running)

    @property
    def _has_grammar(self) -> bool:
        """Whether the completion of a request has to match a grammar."""
        return any(sequence.grammar for sequence in self.scheduler.running)

    def _allowed(self, logits: mx.array) -> mx.array:
        """The logits [B, N, V], -inf where the grammar of a row refuses the token."""
        if not self._has_grammar:
            return logits
        return allow_only(logits, [s.masks for s in self.scheduler.running])

    def _collect(self, step: tuple | None = None) -> list[TokenOutput]:
        """Read the tokens of a step; None = of the one in flight, if any."""
        if step is None:
            step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        sequences, tokens, logprobs, is_nan = step
        count = len(sequences)
        # Read whole arrays: a slice would be computed after the step that runs now.
        values = tokens.tolist()
        scores = logprobs.read() if logprobs else [[NO_LOGPROBS]] * count
        broken = [False] * count if is_nan is None else is_nan.tolist()
        outputs = []
        for sequence, (token,), (score,), failed in zip(
            sequences, values, scores, broken, strict=True
        ):
            if sequence.finished:
                continue
            if failed:
                outputs.append(sequence.fail(nan_predictions("the model")))
            else:
                outputs.append(sequence.add(token, score))
        if self.scheduler.has_drafts:
            self.stats.standard_tokens += len(outputs)
        return outputs

    # Rounds of draft tokens

    def _propose(self) -> bool:
        """Launch the drafts of all rows; returns whether there is a draft token."""
        running = self.scheduler.running
        if not running:
            return False
        for sequence in running:
            if sequence.proposer is None:  # its draft model is broken
                sequence.set_draft(NO_DRAFT)
        requests = [
            (s, DraftRequest(s.proposer, s.tokens, limit, s.sampler))
            for s, limit in zip(running, self.scheduler.draft_limits(), strict=True)
            if s.draft is None
        ]
        drafts = propose([request for _, request in requests])
        for (sequence, _), draft in zip(requests, drafts, strict=True):
            if isinstance(draft, UserError):
                draft = self._stop_drafting(sequence, draft)
            sequence.set_draft(draft)
        has_drafts = any(s.draft.size for s in running)
        # Not after a last token, which needs no draft: the next request may have one.
        if has_drafts or any(s.remaining > 1 for s in running):
            self.scheduler.drafts.found(has_drafts)
        for sequence in [] if has_drafts else running:
            sequence.draft = None
        return has_drafts

    def _stop_drafting(self, sequence: RunningSequence, error: UserError) -> mx.array:
        """Let a request go on without drafts, on which its tokens do not depend."""
        sequence.proposer.close()
        sequence.proposer = None
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{error.message}; the requests concerned go on without drafts",
                stacklevel=2,
            )
        return NO_DRAFT

    def _round(self) -> list[TokenOutput]:
        """Verify the drafts of all rows, roll back the rejected ones, draft again."""
        start = time.perf_counter()
        sequences, planner = list(self.scheduler.running), self.scheduler.drafts
        drafts = [sequence.draft for sequence in sequences]
        counts = [len(draft) + 1 for draft in drafts]
        tokens = _padded(
            [
                mx.concatenate([mx.array(s.tokens[-1:], mx.int32), draft])
                for s, draft in zip(sequences, drafts, strict=True)
            ],
            max(counts),
        )
        logits = self._rows.forward(tokens, counts)
        is_nan = mx.isnan(logits[:, 0]).any(axis=-1) if self._is_first else None
        samplers = [sequence.sampler for sequence in sequences]
        seen = [s.sampler.counts_along(s.draft) for s in sequences]
        positions = [len(sequence.tokens) for sequence in sequences]
        allowed = self._allowed(logits)
        samples = sample_rows(samplers, allowed, positions, seen)
        logprobs = token_logprobs(sequences, logits, allowed, samples, seen)
        mx.eval(samples, tokens, logprobs and logprobs.arrays, is_nan)
        scores = logprobs and logprobs.read()
        broken = [False] * len(counts) if is_nan is None else is_nan.tolist()
        outputs, lengths, back = [], [], []
        rows = zip(sequences, counts, tokens.tolist(), samples.tolist(), strict=True)
        for row, (sequence, count, drafted, sampled) in enumerate(rows):
            accepted = accepted_tokens(drafted[1:count], sampled)
            lengths.append(accepted)
            before = len(sequence.tokens)
            if broken[row]:
                outputs.append(sequence.fail(nan_predictions("the model")))
            for index, token in enumerate(sampled[: accepted + 1]):
                if sequence.finished:
                    break
                score = scores[row][index] if scores else NO_LOGPROBS
                is_draft = index < accepted
                outputs.append(sequence.add(token, score, is_draft=is_draft))
            new = sequence.tokens[before:]
            sequence.sampler.advance(mx.array(new, mx.int32))
            sequence.launched = sequence.emitted
            back.append(count - len(new))
        self._rows.rollback(back)
        seconds = self._launch_seconds + time.perf_counter() - start
        planner.time_round([count - 1 for count in counts], lengths, seconds)
        start = time.perf_counter()
        for sequence in sequences:
            sequence.draft = None
        self._next_tokens = mx.array([s.tokens[-1] for s in sequences], mx.int32)
        self._remove_finished()
        if self.num_running and planner.length(self.num_running):
            self._propose()
        self._launch_seconds = time.perf_counter() - start
        return outputs


def _padded(rows: Sequence[mx.array], width: int) -> mx.array:
    """Rows of tokens [B, width], padded on the right."""
    return mx.stack([mx.pad(row, (0, width - len(row))) for row in rows])
