"""Speculative decoding: propose draft tokens, verify them in one forward pass."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..decode_loop import CLEAR_CACHE_INTERVAL, prefill, require_numbers, wired_limit
from ..kv_cache import CacheState
from ..sampling import Sampling
from .draft_length import DraftLengthController
from .proposer import NO_DRAFT, DraftTokens, Proposer, TargetSampler

STANDARD_TOKENS = 16
"""Tokens decoded without a draft in a row, when the draft length is 0."""
RETRY_TOKENS = 4
"""The same when the proposer had no draft tokens, so that it is tried again soon."""


@dataclass
class SpeculativeStats:
    """Statistics of speculative decoding.

    Attributes:
        rounds: verifications of at least one draft token.
        standard_tokens: tokens decoded without a draft.
        generated_tokens: all tokens but the first of every completion.
        proposed, accepted: number of draft tokens per position. A draft token counts
            only if all draft tokens before it were accepted.
        seconds: time of all rounds and standard steps.
    """

    rounds: int = 0
    standard_tokens: int = 0
    generated_tokens: int = 0
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    predicted_speedup: float | None = None
    measured_speedup: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the draft tokens whose predecessors were accepted."""
        return sum(self.accepted) / sum(self.proposed) if self.proposed else None

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """The acceptance rate at every draft position, given all before it."""
        pairs = zip(self.accepted, self.proposed, strict=True)
        return [accepted / total if total else 0.0 for accepted, total in pairs]

    @property
    def accepted_length(self) -> float | None:
        """Mean tokens per round: the accepted draft tokens plus the target's token."""
        if not self.rounds:
            return None
        return (sum(self.accepted) + self.rounds) / self.rounds

    def add_round(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verification."""
        self.rounds += 1
        self.generated_tokens += num_accepted + 1
        verified = min(num_accepted + 1, num_draft_tokens)
        for counts, number in (self.proposed, verified), (self.accepted, num_accepted):
            counts.extend([0] * (num_draft_tokens - len(counts)))
            for position in range(number):
                counts[position] += 1

    def merge(self, other: "SpeculativeStats") -> None:
        """Add the counts of another completion. Times are not added."""
        self.rounds += other.rounds
        self.standard_tokens += other.standard_tokens
        self.generated_tokens += other.generated_tokens
        for counts, others in (
            (self.proposed, other.proposed),
            (self.accepted, other.accepted),
        ):
            counts.extend([0] * (len(others) - len(counts)))
            for position, number in enumerate(others):
                counts[position] += number

    def to_json(self) -> dict:
        """The statistics for reports."""
        return {
            "rounds": self.rounds,
            "standard_tokens": self.standard_tokens,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_rate_by_position": self.acceptance_rate_by_position,
            "accepted_length": self.accepted_length,
            "predicted_speedup": self.predicted_speedup,
            "speedup": self.measured_speedup,
        }


class SpeculativeDecoder:
    """Decodes one prompt with draft tokens, without changing the output distribution.

    Args:
        cache: may already contain a prefix of the prompt.
        proposer: used for this request only.
        draft_length: may have statistics of earlier requests.
        sequential_verify: verify with forward passes of one token. Then even the
            rounding is that of standard decoding, but there is no speed-up.
    """

    def __init__(
        self,
        cache: CacheState,
        proposer: Proposer,
        *,
        draft_length: DraftLengthController,
        sampling: Sampling,
        prefill_step_size: int = 512,
        sequential_verify: bool = False,
    ):
        self.cache = cache
        self.proposer = proposer
        self.draft_length = draft_length
        self.sampling = sampling
        self.prefill_step_size = prefill_step_size
        self.sequential_verify = sequential_verify
        self.stats = SpeculativeStats()
        self._key = mx.random.key(sampling.seed)
        self._context: list[int] = []
        # The draft tokens of the next round, and the time their launch took.
        self._next_draft: DraftTokens | None = None
        self._launch_seconds = 0.0

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield `max_tokens` tokens. The next draft already runs when one is yielded.

        At any kind of end, the cache contains only tokens of the prompt and this
        completion. Some of them may never have been yielded; they can be rolled back.
        """
        if not max_tokens:
            return
        with wired_limit():
            unread = mx.array([prompt[self.cache.length : -1]], mx.int32)
            prefill(self.cache, unread, step_size=self.prefill_step_size)
            logits = self.cache.forward(mx.array([prompt[-1:]], mx.int32))[:, -1]
            require_numbers(logits, "the model")
            self._sampler = TargetSampler(self.sampling, prompt, logits.shape[-1])
            self._context = [*prompt, self._sample(logits).item()]
            yield self._context[-1]
            end = len(prompt) + max_tokens
            while (remaining := end - len(self._context)) > 0:
                draft, self._next_draft = self._next_draft, None
                draft = draft or self._propose(remaining)
                if len(draft):
                    yield from self._round(draft, end)
                elif self._num_draft_tokens(remaining):
                    yield from self._standard(min(RETRY_TOKENS, remaining))
                else:
                    yield from self._standard(min(STANDARD_TOKENS, remaining))
                if self.stats.rounds % CLEAR_CACHE_INTERVAL == 0:
                    mx.clear_cache()

    def _num_draft_tokens(self, remaining: int) -> int:
        """The draft length of the next round. The target adds one token to it."""
        return min(self.draft_length.next_length(), remaining - 1)

    def _propose(self, remaining: int) -> DraftTokens:
        num_draft_tokens = self._num_draft_tokens(remaining)
        if not num_draft_tokens:
            return NO_DRAFT
        return self.proposer.propose(self._context, num_draft_tokens, self._sampler)

    def _round(self, draft: DraftTokens, end: int) -> Iterator[int]:
        """Verify a draft, roll back its rejected tokens, launch the next draft."""
        start = time.perf_counter()
        num_accepted, token = self._verify(draft)
        mx.eval(num_accepted, token, draft.tokens)
        seconds = self._launch_seconds + time.perf_counter() - start
        num_accepted = num_accepted.item()
        self.cache.rollback(
            len(draft) - num_accepted, sequential=self.sequential_verify
        )
        tokens = [*draft.tokens[:num_accepted].tolist(), token.item()]
        sampler = self._sampler
        sampler.counts = sampler.counts_after(
            sampler.counts, mx.array(tokens, mx.int32)
        )
        self._context += tokens
        self.stats.add_round(len(draft), num_accepted)
        self.draft_length.record_round(len(draft), num_accepted, seconds)
        self._update_stats(seconds)
        start = time.perf_counter()
        if (remaining := end - len(self._context)) > 0:
            self._next_draft = self._propose(remaining)
        self._launch_seconds = time.perf_counter() - start
        yield from tokens

    def _verify(self, draft: DraftTokens) -> tuple[mx.array, mx.array]:
        """The number of accepted draft tokens and the token after them, both lazy."""
        sampler = self._sampler
        last = mx.array(self._context[-1:], mx.int32)
        self.cache.checkpoint()
        logits = self._forward(mx.concatenate([last, draft.tokens]))
        logits = sampler.process(logits, sampler.counts_along(draft.tokens))
        if sampler.is_greedy:
            return verify_greedy(logits, draft)
        self._key, subkey = mx.random.split(self._key)
        return rejection_sample(logits, draft, subkey)

    def _forward(self, tokens: mx.array) -> mx.array:
        """Logits [k, V] after each of the tokens [k]."""
        if not self.sequential_verify:
            return self.cache.forward(tokens[None])[0]
        logits = [self.cache.forward(token[None, None])[0] for token in tokens]
        return mx.concatenate(logits)

    def _standard(self, count: int) -> Iterator[int]:
        """Decode `count` tokens without a draft, with one step always in flight."""
        self.cache.commit()
        seconds, start = 0.0, time.perf_counter()
        next_token = self._step(mx.array(self._context[-1:], mx.int32))
        for n in range(1, count + 1):
            token = next_token
            if n < count:
                next_token = self._step(token)
            self._context.append(token.item())
            self.stats.standard_tokens += 1
            # The time of the consumer is not counted.
            seconds += time.perf_counter() - start
            if n == count:  # before the yield: the consumer may stop at this token
                self.stats.generated_tokens += count
                self.draft_length.record_standard(count, seconds)
                self._update_stats(seconds)
            yield self._context[-1]
            start = time.perf_counter()

    def _step(self, token: mx.array) -> mx.array:
        token = self._sample(self.cache.forward(token[None])[:, -1])
        mx.async_eval(token)
        return token

    def _sample(self, logits: mx.array) -> mx.array:
        """Sample one token [1] and count it."""
        sampler = self._sampler
        logits = sampler.process(logits, sampler.counts)
        if sampler.is_greedy:
            token = mx.argmax(logits, axis=-1)
        else:
            self._key, subkey = mx.random.split(self._key)
            token = mx.random.categorical(logits, key=subkey)
        sampler.counts = sampler.counts_after(sampler.counts, token)
        return token.astype(mx.int32)

    def _update_stats(self, seconds: float) -> None:
        stats, controller = self.stats, self.draft_length
        stats.seconds += seconds
        if controller.standard.is_known:
            standard_seconds = stats.generated_tokens * controller.standard.mean
            stats.measured_speedup = standard_seconds / stats.seconds
        lengths = [k for k, timer in controller.rounds.items() if timer.is_known]
        speedups = [controller.predicted_speedup(k) for k in lengths]
        stats.predicted_speedup = max([s for s in speedups if s], default=None)


def verify_greedy(logits: mx.array, draft: DraftTokens) -> tuple[mx.array, mx.array]:
    """Accept draft tokens while they equal the target's argmax.

    Args:
        logits: [k + 1, V], the target's logits after 0 to k draft tokens.

    Returns:
        The number of accepted draft tokens and the token after them; both int [].
    """
    best = mx.argmax(logits, axis=-1)
    matches = best[: len(draft)] == draft.tokens
    accepted = mx.cumprod(matches.astype(mx.int32)).sum() if len(draft) else mx.array(0)
    return accepted, best[accepted]


def rejection_sample(
    logits: mx.array, draft: DraftTokens, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Speculative sampling (arXiv 2211.17192, 2302.01318).

    A draft token x sampled from q is accepted with probability min(1, p(x) / q(x)).
    After the first rejection, the next token is sampled from the normalized positive
    part of p - q. So every token is distributed as p, in float32, if q is the
    distribution that the draft token was really sampled from.

    Arguments and results are those of `verify_greedy`.
    """
    count = len(draft)
    logits = logits.astype(mx.float32)
    target = mx.softmax(logits, axis=-1)
    if not count:
        return mx.array(0), mx.random.categorical(logits[0], key=key)
    accept_key, residual_key = mx.random.split(key)
    tokens = draft.tokens[:, None]
    if draft.logits is None:
        columns = mx.arange(logits.shape[-1])
        proposed = (tokens == columns).astype(mx.float32)
    else:
        proposed = mx.softmax(draft.logits.astype(mx.float32), axis=-1)
    p = mx.take_along_axis(target[:count], tokens, axis=-1)[:, 0]
    q = mx.take_along_axis(proposed, tokens, axis=-1)[:, 0]
    is_accepted = mx.random.uniform(shape=(count,), key=accept_key) * q < p
    accepted = mx.cumprod(is_accepted.astype(mx.int32)).sum()
    # After the last draft token q is 0, so the residual is p itself.
    residual = mx.maximum(target - mx.pad(proposed, [(0, 1), (0, 0)]), 0.0)[accepted]
    # Rounding can leave an empty residual if p and q are equal.
    residual = mx.where(residual.sum() > 0, residual, target[accepted])
    return accepted, mx.random.categorical(mx.log(residual), key=residual_key)
