"""Teacher-forced estimates of the acceptance rate and the accepted length."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..generation.sampling import Sampling
from ..generation.speculative.proposer import TargetSampler
from .cost_model import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class ReferenceCompletion:
    """A completion sampled from the target.

    Attributes:
        target: maps tokens [B, L] to logits [B, L, V].
        tokens: the completion, sampled with `sampling`.
    """

    target: Any
    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Sampling

    def acceptance_probs(self, draft: Any) -> np.ndarray:
        """The acceptance probability [L - 1] at every token but the first.

        For a token x sampled from p, min(1, q(x) / p(x)) has the expectation
        sum min(p, q), the acceptance rate of a draft token sampled from q. With greedy
        decoding the probability is 1 where the draft's argmax is x, else 0.
        """
        logits = self._logits(draft)
        if self.sampling.is_greedy:
            matches = mx.argmax(logits, axis=-1) == self._drafted_tokens
            return np.array(matches).astype(float)
        ratio = mx.exp(self._logprobs(logits) - self._target_logprobs)
        return np.array(mx.minimum(1.0, ratio)).astype(float)

    @property
    def _drafted_tokens(self) -> mx.array:
        """All tokens but the first, which is never drafted."""
        return mx.array(self.tokens[1:], mx.int32)

    @cached_property
    def _target_logprobs(self) -> mx.array:
        logprobs = self._logprobs(self._logits(self.target))
        mx.eval(logprobs)
        return logprobs

    @cached_property
    def _sampler(self) -> TargetSampler:
        # Only the shape is used, so nothing is computed.
        vocab_size = self.target(mx.zeros((1, 1), mx.int32)).shape[-1]
        return TargetSampler(self.sampling, self.prompt, vocab_size)

    def _logits(self, model: Any) -> mx.array:
        """A model's processed logits [L - 1, V] for all tokens but the first."""
        tokens = mx.array([[*self.prompt, *self.tokens]], mx.int32)
        logits = model(tokens)[0, len(self.prompt) : -1]
        return self._sampler.process(logits, self._sampler.counts)

    def _logprobs(self, logits: mx.array) -> mx.array:
        logit = mx.take_along_axis(logits, self._drafted_tokens[:, None], axis=-1)[:, 0]
        return logit - mx.logsumexp(logits, axis=-1)


def all_acceptance_probs(
    completions: Sequence[ReferenceCompletion], draft: Any
) -> list[np.ndarray]:
    """The acceptance probabilities of every completion with at least two tokens."""
    return [c.acceptance_probs(draft) for c in completions if len(c.tokens) > 1]


def predict_accepted_lengths(acceptance_probs: Sequence[np.ndarray]) -> list[float]:
    """The predicted accepted length with 1, 2, ... `MAX_DRAFT_TOKENS` draft tokens."""
    return [
        predict_accepted_length(acceptance_probs, num_draft_tokens)
        for num_draft_tokens in range(1, MAX_DRAFT_TOKENS + 1)
    ]


def predict_accepted_length(
    acceptance_probs: Sequence[np.ndarray], num_draft_tokens: int
) -> float:
    """Predicted mean tokens per round, along completions of the target.

    A round starts where the one before it ended, so the probability that a round starts
    is propagated through the positions of a completion.

    Args:
        acceptance_probs: [L - 1] per completion, for all tokens but the first.
    """
    tokens, rounds = 0, 0.0
    for probs in acceptance_probs:
        length = len(probs)
        starts = np.zeros(length + 1)
        starts[0] = 1.0
        for position in range(length):
            chance = starts[position]
            rounds += chance
            # A round ends at the first rejection, or one token after the last draft.
            for end in range(position, min(position + num_draft_tokens, length)):
                starts[end + 1] += chance * (1 - probs[end])
                chance *= probs[end]
            starts[min(position + num_draft_tokens + 1, length)] += chance
        tokens += length
    return tokens / rounds if rounds else 1.0
