"""Speculative decoding: a proposer guesses, the model verifies many tokens at once."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..decode_loop import CLEAR_CACHE_INTERVAL, prefill, wired_limit
from ..kv_cache import CacheState
from ..sampling import Sampling
from . import verification
from .draft_length import DraftLengthController
from .proposer import NO_DRAFT, DraftTokens, Proposer, TargetSampler

BURST = 16
"""Tokens that are decoded plainly, one step always in flight, when guessing is off."""
SEARCH = 4
"""As many where a proposer has no guess, so that it is soon asked again."""
SPLIT = 16
"""Of so many rounds one is timed in parts, which waits for the guesses alone."""


@dataclass
class SpeculativeStats:
    """How speculation went.

    Attributes:
        rounds: verifications of at least one guess.
        plain: tokens decoded without a guess.
        tried, stood: guesses at every place of which all before them stood, and those
            of them that stood.
        seconds: of the rounds and of plain decoding.
        draft_ms, verify_ms: of the rounds that were timed in parts, on average.
    """

    rounds: int = 0
    plain: int = 0
    said: int = 0
    tried: list[int] = field(default_factory=list)
    stood: list[int] = field(default_factory=list)
    seconds: float = 0.0
    predicted_speedup: float | None = None
    measured_speedup: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the guesses that stood, of those whose predecessors stood."""
        return sum(self.stood) / sum(self.tried) if self.tried else None

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """Share of guesses that stood where all before them did, place by place."""
        pairs = zip(self.stood, self.tried, strict=True)
        return [stood / tried if tried else 0.0 for stood, tried in pairs]

    @property
    def accepted_length(self) -> float | None:
        """Tokens of a verification: the guesses that stood, and the one after them."""
        return (sum(self.stood) + self.rounds) / self.rounds if self.rounds else None

    def add(self, guessed: int, stood: int) -> None:
        """Count a verification."""
        self.rounds += 1
        self.said += stood + 1
        judged = min(stood + 1, guessed)
        for counts, number in ((self.tried, judged), (self.stood, stood)):
            counts.extend([0] * (guessed - len(counts)))
            for place in range(number):
                counts[place] += 1

    def merge(self, other: "SpeculativeStats") -> None:
        """Count the rounds of another answer, too; times are not summed up."""
        self.rounds += other.rounds
        self.plain += other.plain
        self.said += other.said
        for mine, its in ((self.tried, other.tried), (self.stood, other.stood)):
            mine.extend([0] * (len(its) - len(mine)))
            for place, number in enumerate(its):
                mine[place] += number

    def to_json(self) -> dict:
        """For reports."""
        return {
            "rounds": self.rounds,
            "plain_tokens": self.plain,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": self.acceptance_rate_by_position,
            "accepted_length": self.accepted_length,
            "predicted_speedup": self.predicted_speedup,
            "speedup": self.measured_speedup,
            "draft_ms": self.draft_ms,
            "verify_ms": self.verify_ms,
        }


class SpeculativeDecoder:
    """Decodes one prompt, with guesses that change nothing about what is said.

    Args:
        session: may have read some of the prompt.
        proposer: of this request alone.
        controller: may have learnt from earlier requests.
        rule: how guesses are judged when sampling; greedy text is compared token by
            token.
        sequential_verify: verify in forward passes of one token, so that rounding, too, is
            that of plain decoding. Guesses then save no time.
    """

    def __init__(
        self,
        session: CacheState,
        proposer: Proposer,
        *,
        draft_length: DraftLengthController,
        sampling: Sampling,
        rule: verification.Rule = "rejection",
        prefill_step_size: int = 512,
        sequential_verify: bool = False,
    ):
        self.session = session
        self.proposer = proposer
        self.draft_length = draft_length
        self.sampling = sampling
        self.rule = rule
        self.prefill_step_size = prefill_step_size
        self.sequential_verify = sequential_verify
        self.stats = SpeculativeStats()
        self._key = mx.random.key(sampling.seed)
        self._parts: list[tuple[float, float]] = []
        self._context: list[int] = []
        # The next guesses, and how long launching them took.
        self._ahead: DraftTokens | None = None
        self._drafting = 0.0

    def decode(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Yield `count` tokens; when one is, the next guesses are already on their way.

        However it ends, the session has read nothing but the prompt and tokens of this
        answer, though perhaps some that were never yielded: those can be rolled back.
        """
        if not count:
            return
        with wired_limit():
            unread = mx.array([prompt[self.session.length : -1]], mx.int32)
            prefill(self.session, unread, width=self.prefill_step_size)
            logits = self.session.forward(mx.array([prompt[-1:]], mx.int32))[:, -1]
            self._choice = TargetSampler(self.sampling, prompt, logits.shape[-1])
            self._context = [*prompt, self._drawn(logits).item()]
            yield self._context[-1]
            end = len(prompt) + count
            while (left := end - len(self._context)) > 0:
                proposal, self._ahead = self._ahead or self._proposal(left), None
                if len(proposal):
                    yield from self._round(proposal, end)
                else:
                    length = SEARCH if self._wanted(left) else BURST
                    yield from self._plain(min(length, left))
                if self.stats.rounds % CLEAR_CACHE_INTERVAL == 0:
                    mx.clear_cache()

    def _wanted(self, left: int) -> int:
        """Guesses to ask for; the token after them comes by itself."""
        return min(self.draft_length.length(), left - 1)

    def _proposal(self, left: int) -> DraftTokens:
        length = self._wanted(left)
        if not length:
            return NO_DRAFT
        return self.proposer.propose(self._context, length, self._choice)

    def _round(self, proposal: DraftTokens, end: int) -> Iterator[int]:
        start = time.perf_counter()
        is_split = self.stats.rounds % SPLIT == 1
        if is_split:
            mx.eval(proposal.tokens)
            drafted = time.perf_counter()
        stood, token = self._verified(proposal)
        mx.eval(stood, token, proposal.tokens)
        checked = time.perf_counter()
        stood = stood.item()
        self.session.rollback(
            len(proposal) - stood, sequential_verify=self.sequential_verify
        )
        tokens = [*proposal.tokens[:stood].tolist(), token.item()]
        choice = self._choice
        choice.counts = choice.after(choice.counts, mx.array(tokens, mx.int32))
        self._context += tokens
        self.stats.add(len(proposal), stood)
        if is_split:
            self._parts.append((self._drafting + drafted - start, checked - drafted))
        self.draft_length.record_round(
            len(proposal), stood, self._drafting + checked - start
        )
        self._sum_up(self._drafting + checked - start)
        start = time.perf_counter()
        if (left := end - len(self._context)) > 0:
            self._ahead = self._proposal(left)
        self._drafting = time.perf_counter() - start
        yield from tokens

    def _verified(self, proposal: DraftTokens) -> tuple[mx.array, mx.array]:
        """How many guesses stand, and the token after them, not yet computed."""
        choice = self._choice
        last = mx.array(self._context[-1:], mx.int32)
        self.session.checkpoint()
        rows = mx.concatenate([last, proposal.tokens])
        logits = self._read(rows)
        logits = choice.logits(logits, choice.along(proposal.tokens))
        if choice.is_greedy:
            return verification.greedy(logits, proposal)
        self._key, now = mx.random.split(self._key)
        return getattr(verification, self.rule)(logits, proposal, now)

    def _read(self, tokens: mx.array) -> mx.array:
        """Logits [k, V] behind tokens [k]."""
        if not self.sequential_verify:
            return self.session.forward(tokens[None])[0]
        rows = [self.session.forward(token[None, None])[0] for token in tokens]
        return mx.concatenate(rows)

    def _plain(self, count: int) -> Iterator[int]:
        """Decode without guesses, one step always in flight."""
        self.session.commit()
        seconds, start = 0.0, time.perf_counter()
        ahead = self._step(mx.array(self._context[-1:], mx.int32))
        for number in range(1, count + 1):
            now = ahead
            if number < count:
                ahead = self._step(now)
            self._context.append(now.item())
            self.stats.plain += 1
            # The time of who reads the tokens is not ours.
            seconds += time.perf_counter() - start
            if number == count:
                # Who reads the tokens may leave with the last one.
                self.stats.said += count
                self.draft_length.record_plain(count, seconds)
                self._sum_up(seconds)
            yield self._context[-1]
            start = time.perf_counter()

    def _step(self, token: mx.array) -> mx.array:
        token = self._drawn(self.session.forward(token[None])[:, -1])
        mx.async_eval(token)
        return token

    def _drawn(self, logits: mx.array) -> mx.array:
        """One token [1], counted."""
        choice = self._choice
        logits = choice.logits(logits, choice.counts)
        if choice.is_greedy:
            token = mx.argmax(logits, axis=-1)
        else:
            self._key, now = mx.random.split(self._key)
            token = mx.random.categorical(logits, key=now)
        choice.counts = choice.after(choice.counts, token)
        return token.astype(mx.int32)

    def _sum_up(self, seconds: float) -> None:
        stats, controller = self.stats, self.draft_length
        stats.seconds += seconds
        if controller.plain.is_known:
            by_itself = stats.said * controller.plain.mean
            stats.measured_speedup = by_itself / stats.seconds
        lengths = [k for k, times in controller.rounds.items() if times.is_known]
        speedups = [controller.speedup(k) for k in lengths]
        stats.predicted_speedup = max([s for s in speedups if s], default=None)
        if self._parts:
            draft, check = mx.array(self._parts).mean(axis=0).tolist()
            stats.draft_ms, stats.verify_ms = 1000 * draft, 1000 * check
