"""The engine: it owns every forward pass with a cache, for one request or many.

A step prefills a chunk of a waiting prompt, or several short ones, and decodes a token
of every running request, or a round of draft tokens. So a long prompt does not block
the others.
"""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx

from ..errors import UserError, nan_predictions
from .grammar_matcher import allow_only
from .kv_cache.batch import CacheBatch, OneRow, join
from .logprobs import token_logprobs
from .sampler import sample_rows
from .scheduler import Scheduler
from .sequence import (
    NO_LOGPROBS,
    GenerationRequest,
    RunningSequence,
    TokenOutput,
)
from .speculative.draft_length import (
    DraftLengthController,
    SpeculativeStats,
    StandardSteps,
)
from .speculative.proposer import (
    NO_DRAFT,
    DraftRequest,
    MakeProposer,
    accepted_tokens,
    propose,
)

CLEAR_CACHE_INTERVAL = 256
"""Steps between releases of MLX's buffer cache, which grows with the context."""
FIRST_STANDARD_STEPS, STANDARD_STEPS = 4, 16
"""Steps without a draft in a row, while their time is not known (few, so that short
requests get drafts), and then when the draft length is 0."""
RETRY_STEPS = 1, 2, 3, 3
"""The same after tries in a row without draft tokens. Each try adds a step that is not
launched ahead: a cycle of 13 tokens, a prime number, so that a text with a shorter
period is tried at every place of it."""


class Engine:
    """Generates the completions of requests that are added at any time.

    A request gets the tokens that it gets alone. Not thread-safe.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        make_proposer: makes a proposer of draft tokens for every request from its
            cache, for speculative decoding.
        draft_length: chooses the number of draft tokens for one request; batches get
            their own like it.
        options: those of `Scheduler`.

    Attributes:
        stats: counts of speculative decoding.
        beat_seconds: after which an engine without requests takes a step; None = never.
    """

    beat_seconds: float | None = None

    def __init__(
        self,
        model: Any,
        *,
        make_proposer: MakeProposer | None = None,
        draft_length: DraftLengthController | None = None,
        **options: Any,
    ):
        self.model = model
        self.scheduler = Scheduler(model, make_proposer=make_proposer, **options)
        self.draft_length = draft_length or DraftLengthController()
        self.stats = SpeculativeStats()
        self._running: list[RunningSequence] = []
        self._rows: OneRow | CacheBatch | None = None
        self._next_tokens = mx.zeros(0, mx.int32)
        self._in_flight: tuple | None = None
        self._controllers: dict[int, DraftLengthController] = {}
        self._standard = StandardSteps()
        self._misses = 0  # tries in a row without draft tokens
        self._has_warned = False  # of a broken draft model
        self._launch_seconds = 0.0
        self._steps = 0
        self._wired = ExitStack()

    @property
    def idle(self) -> bool:
        """Whether all requests are finished."""
        return not (self.scheduler.waiting or self._running or self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that are decoded."""
        return len(self._running)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        states = [s.state for s in self.scheduler.waiting if s.state]
        return sum(x.nbytes for x in [*states, *([self._rows] if self._rows else [])])

    def add_request(self, request: GenerationRequest) -> None:
        """Add a request to the queue."""
        assert len(request.prompt), "a prompt has at least one token"
        if request.max_tokens < 1:
            return
        if self.idle:
            self._wired.enter_context(wired_limit())
            self.scheduler.measure_memory()
        self.scheduler.add(request)

    def close(self) -> None:
        """Let other processes end, if there are any."""

    def remove_adapter(self, name: str) -> None:
        """Free an adapter, and the prefixes that were processed with it.

        Raises:
            UserError: there is none of this name, or requests have it.
        """
        adapters = self.scheduler.adapters
        number = adapters.number(name)
        users = [*self.scheduler.waiting, *self._running]
        if any(sequence.adapter == number for sequence in users):
            raise UserError(f"requests are running with the adapter {name!r}")
        adapters.remove(name)
        if self.scheduler.prefix_cache:
            self.scheduler.prefix_cache.drop(number)

    def abort(self, request: GenerationRequest) -> None:
        """Drop a request, at any time between two steps."""
        for sequence in (*self.scheduler.waiting, *self._running):
            if sequence.request is request:
                sequence.finished = True
        if all(s.finished for s in (*self.scheduler.waiting, *self._running)):
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
            for sequence in (*self.scheduler.waiting, *self._running):
                sequence.close()
            self.scheduler.waiting, self._running, self._in_flight = [], [], None
            self._rest()
            raise
        if self.idle:
            self._rest()
        return outputs

    def _step(self) -> list[TokenOutput]:
        self._remove_finished()
        outputs = self._preempt()
        errors, ready = self.scheduler.prefill(self._running)
        outputs += errors
        for sequence in ready:
            self._join(sequence)
        self._steps += 1
        if self._steps % CLEAR_CACHE_INTERVAL == 0:
            mx.clear_cache()
        if self._wants_draft():
            outputs += self._collect()
            self._remove_finished()
            start = time.perf_counter()
            if self._propose():
                self._launch_seconds += time.perf_counter() - start
                return outputs + self._round()
        return outputs + self._standard_step()

    def _rest(self) -> None:
        self._rows, self._next_tokens = None, mx.zeros(0, mx.int32)
        self._wired.close()

    # Rows

    def _remove_finished(self) -> None:
        """Take requests out that are finished or whose last token is launched."""
        self.scheduler.remove_finished()
        for row in reversed(range(len(self._running))):
            sequence = self._running[row]
            is_launched = sequence.launched >= sequence.request.max_tokens
            if sequence.finished or is_launched:
                self._leave(row)

    def _leave(self, row: int) -> None:
        sequence, last = self._running[row], len(self._running) - 1
        sequence.close()
        prefix_cache = self.scheduler.prefix_cache
        if prefix_cache and not sequence.failed:
            length = min(self._rows.lengths[row], len(sequence.tokens))
            state = self._rows.extract(row)
            if state.trim(state.length - length):
                prefix_cache.insert(sequence.tokens[:length], state)
        self._running[row] = self._running[last]
        self._running.pop()
        if not last:
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
        while self.scheduler.is_short(self._running):
            outputs += self._collect()
            self._remove_finished()
            if self.scheduler.is_short(self._running):
                last = max(self._running, key=lambda sequence: sequence.rank)
                self._leave(self._running.index(last))
                self.scheduler.preempt(last)
        return outputs

    def _join(self, sequence: RunningSequence) -> None:
        """Add a prefilled request to the batch."""
        self._rows = join(self._rows, sequence.state)
        sequence.state, sequence.launched = None, sequence.emitted
        self._running.append(sequence)
        last = mx.array([sequence.tokens[-1]], mx.int32)
        self._next_tokens = mx.concatenate([self._next_tokens, last])
        self._standard = StandardSteps(self._standard.left)

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
        if previous:
            self._time_standard(time.perf_counter() - start)
        return outputs

    def _launch(self) -> tuple | None:
        """Launch a step of all rows, without waiting for the one before."""
        if not self._running:
            return None
        logits = self._rows.forward(self._next_tokens[:, None])
        is_nan = mx.isnan(logits).any(axis=(1, 2)) if self._is_first else None
        positions = [len(s.request.prompt) + s.launched for s in self._running]
        samplers = [sequence.sampler for sequence in self._running]
        if self._has_grammar:
            mx.async_eval(logits)  # they are computed while the masks are
            for sequence in self._running:
                sequence.mask_draft([])
        allowed = self._allowed(logits)
        tokens = sample_rows(samplers, allowed, positions)
        logprobs = token_logprobs(self._running, logits, allowed, tokens)
        mx.async_eval(tokens, logprobs and logprobs.arrays, is_nan)
        self._next_tokens = tokens[:, 0]
        for row, sequence in enumerate(self._running):
            sequence.launched += 1
            if sequence.sampler.has_counts:
                sequence.sampler.advance(tokens[row])
        return list(self._running), tokens, logprobs, is_nan

    @property
    def _is_first(self) -> bool:
        """Whether a request gets its first prediction."""
        return any(sequence.launched == 0 for sequence in self._running)

    @property
    def _has_grammar(self) -> bool:
        """Whether the completion of a request has to match a grammar."""
        return any(sequence.grammar for sequence in self._running)

    def _allowed(self, logits: mx.array) -> mx.array:
        """The logits [B, N, V], -inf where the grammar of a row refuses the token."""
        if not self._has_grammar:
            return logits
        return allow_only(logits, [sequence.masks for sequence in self._running])

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
        if self.scheduler.make_proposer:
            self.stats.standard_tokens += len(outputs)
        return outputs

    def _time_standard(self, seconds: float) -> None:
        """Time a step without a draft, for the choice of the draft length."""
        if not self.scheduler.make_proposer:
            return
        steps = self._standard
        steps.count, steps.seconds = steps.count + 1, steps.seconds + seconds
        steps.left -= 1
        if steps.left <= 0:
            controller = self._controller
            controller.record_standard(steps.count, steps.seconds)
            self.stats.add_time(steps.count, steps.seconds, controller)

    # Rounds of draft tokens

    @property
    def _controller(self) -> DraftLengthController:
        """The controller for the present number of rows, in powers of two."""
        size = 1 << (len(self._running) - 1).bit_length()
        if size == 1:
            return self.draft_length
        if size not in self._controllers:
            self._controllers[size] = self.draft_length.like()
        return self._controllers[size]

    def _wants_draft(self) -> bool:
        """Whether this step may be a round of draft tokens."""
        if (
            not (self.scheduler.make_proposer and self._running)
            or self._standard.left > 0
        ):
            return False
        if any(s.draft is not None for s in self._running):
            return True
        if self._controller.next_length():
            return True
        is_known = self._controller.standard.is_known
        steps = STANDARD_STEPS if is_known else FIRST_STANDARD_STEPS
        self._standard = StandardSteps(steps)
        return False

    def _propose(self) -> bool:
        """Launch the drafts of all rows; returns whether there is a draft token."""
        if not self._running:
            return False
        count = self._controller.next_length()
        for sequence in self._running:
            if sequence.proposer is None:
                # It came before the engine had a proposer.
                sequence.set_draft(NO_DRAFT)
        waiting = [s for s in self._running if s.draft is None]
        # The target adds one token to them.
        limits = [max(0, min(count, s.remaining - 1)) for s in waiting]
        drafts = propose(
            [
                DraftRequest(s.proposer, s.tokens, limit, s.sampler)
                for s, limit in zip(waiting, limits, strict=True)
            ]
        )
        for sequence, draft in zip(waiting, drafts, strict=True):
            if isinstance(draft, UserError):
                draft = self._stop_drafting(sequence, draft)
            sequence.set_draft(draft)
        if any(s.draft.size for s in self._running):
            self._misses = 0
            return True
        for sequence in self._running:
            sequence.draft = None
        # Not after a last token, which needs no draft: the next request may have one.
        if any(s.remaining > 1 for s in self._running):
            self._standard = StandardSteps(RETRY_STEPS[self._misses])
            self._misses = (self._misses + 1) % len(RETRY_STEPS)
        return False

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
        sequences = list(self._running)
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
        self._count_round([count - 1 for count in counts], lengths, seconds)
        start = time.perf_counter()
        for sequence in sequences:
            sequence.draft = None
        self._next_tokens = mx.array([s.tokens[-1] for s in sequences], mx.int32)
        self._remove_finished()
        if self._running and self._controller.next_length():
            self._propose()
        self._launch_seconds = time.perf_counter() - start
        return outputs

    def _count_round(
        self, drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        for num_draft_tokens, num_accepted in zip(drafted, accepted, strict=True):
            if num_draft_tokens:
                self.stats.add_round(num_draft_tokens, num_accepted)
            else:
                self.stats.standard_tokens += 1
        controller = self._controller
        controller.record_round(drafted, accepted, seconds)
        tokens = 1 + sum(accepted) / len(accepted)
        self.stats.add_time(tokens, seconds, controller)


def _padded(rows: Sequence[mx.array], width: int) -> mx.array:
    """Rows of tokens [B, width], padded on the right."""
    return mx.stack([mx.pad(row, (0, width - len(row))) for row in rows])


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
