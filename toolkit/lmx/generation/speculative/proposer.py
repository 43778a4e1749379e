"""The interface of draft-token proposers, and the target's sampling distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..decode_loop import require_numbers
from ..kv_cache import CacheState
from ..logits_processors import LogitsProcessor
from ..sampling import Sampling, filter_logits


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens proposed for verification.

    Attributes:
        tokens: int32 [k], possibly lazy; k may be 0.
        logits: float32 [k, V], the unnormalized log-probabilities each token was
            sampled from. None = the tokens were chosen deterministically.
    """

    tokens: mx.array
    logits: mx.array | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = DraftTokens(mx.zeros(0, mx.int32))


class Proposer(Protocol):
    """Proposes draft tokens. It must not change the target's output.

    A proposer gets no feedback on acceptance: the next context contains the accepted
    draft tokens.
    """

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: "TargetSampler"
    ) -> DraftTokens:
        """At most `num_draft_tokens` tokens that may follow the context.

        Args:
            context: all tokens of the prompt and the completion so far.
            sampler: the target's sampling settings and token counts.
        """
        ...


MakeProposer = Callable[[CacheState], Proposer]
"""Makes the proposer of one completion from the target's cache."""


class TargetSampler:
    """The distribution the target samples from, shared with the proposer.

    Args:
        sampling: settings of the request.
        context: tokens before the first round, for the penalties.
        vocab_size: the target's vocabulary size.

    Attributes:
        counts: occurrences [1, V] of every token so far; empty without penalties.
    """

    def __init__(self, sampling: Sampling, context: Sequence[int], vocab_size: int):
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._processor = LogitsProcessor.create(sampling, vocab_size)
        self.counts = mx.zeros((1, 0))
        if self._processor:
            self.counts = self._processor.count_prompts([context])

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.sampling.is_greedy

    def counts_after(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [1, V] after tokens [k]."""
        for token in tokens if self._processor else []:
            counts = self._processor.update(counts, token[None])
        return counts

    def counts_along(self, tokens: mx.array) -> mx.array:
        """Counts [k + 1, V] after the first 0 to k of the tokens [k]."""
        counts = [self.counts]
        for token in tokens if self._processor else []:
            counts.append(self.counts_after(counts[-1], token[None]))
        return mx.concatenate(counts)

    def process(self, logits: mx.array, counts: mx.array) -> mx.array:
        """Logits [k, W] of a model as float32 logits [k, V] to sample from.

        The LM head of the draft model may have more or fewer rows than the target's
        (padding). Tokens that are not in both are never sampled.
        """
        width = min(logits.shape[-1], self.vocab_size)
        logits = logits[:, :width].astype(mx.float32)
        if width < self.vocab_size:
            missing = self.vocab_size - width
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        if self._processor:
            logits = self._processor(logits, counts)
        return logits if self.is_greedy else filter_logits(logits, self.sampling)


class DraftSampler:
    """Samples draft tokens one after the other, with the target's settings.

    Args:
        sampled: False = draft greedily.
        seed: of the draft samples, independent of the target's.
    """

    def __init__(self, *, sampled: bool, seed: int):
        self._sampled = sampled
        self._key = mx.random.key(seed)
        self._is_first = True

    def draft(
        self,
        count: int,
        sampler: TargetSampler,
        next_logits: Callable[[mx.array | None], mx.array],
    ) -> DraftTokens:
        """Launch a draft of `count` tokens, at least one.

        Args:
            next_logits: logits [1, V] after a draft token int32 [1]; None = after the
                context.

        Raises:
            UserError: the first logits are NaN.
        """
        counts, rows, tokens = sampler.counts, [], []
        greedy = sampler.is_greedy or not self._sampled
        for _ in range(count):
            logits = next_logits(tokens[-1] if tokens else None)
            if self._is_first:
                require_numbers(logits, "the draft model")
                self._is_first = False
            # Penalties depend on the draft tokens before.
            logits = sampler.process(logits, counts)
            token = mx.argmax(logits, axis=-1) if greedy else self._sample(logits)
            token = token.astype(mx.int32)
            mx.async_eval(token)
            rows.append(logits)
            tokens.append(token)
            counts = sampler.counts_after(counts, token)
        return DraftTokens(
            mx.concatenate(tokens), None if greedy else mx.concatenate(rows)
        )

    def _sample(self, logits: mx.array) -> mx.array:
        self._key, subkey = mx.random.split(self._key)
        return mx.random.categorical(logits, key=subkey)


class HiddenStateProposer:
    """Base class of proposers that read hidden states of the target.

    Args:
        drafter: bound to the target.
        cache: of the completion. From here on, it records hidden states; tokens whose
            states are not known are not read.
        sampled: sample draft tokens with the target's settings; otherwise draft
            greedily. Both are lossless; the better acceptance rate depends on the pair.
        seed: seed of the draft samples, independent of the target's.
    """

    salt: int
    """Sets the samples of every kind of drafter apart."""

    def __init__(
        self, drafter: Any, cache: CacheState, *, sampled: bool = True, seed: int = 0
    ):
        cache.record_hidden_states(drafter.layer_ids)
        self._drafter, self._target_cache = drafter, cache
        self._sampler = DraftSampler(sampled=sampled, seed=seed ^ self.salt)
        self._cache = drafter.make_cache()
