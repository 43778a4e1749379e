"""Teacher-forced estimates of the acceptance rate and the accepted length."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..generation.sampler import Sampler
from ..generation.sampling import Sampling


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

    def probs_of_logits(self, logits: mx.array, first: int = 0) -> np.ndarray:
        """The acceptance probabilities [M, K] of rounds with these logits [M, K, V].

        The first draft token of round m is for token first + m of the completion. Draft
        tokens are sampled with the noise of their position, as the completion was, and
        are accepted if both are equal: the probability is 0 or 1. It is 0 past the end.
        """
        rounds, count, _ = logits.shape
        places = first + mx.arange(rounds)[:, None] + mx.arange(count)
        is_inside = places < len(self.tokens)
        places = mx.minimum(places, len(self.tokens) - 1)
        drafted = mx.array(self.tokens, mx.int32)[places]
        positions = np.array(len(self.prompt) + places).reshape(-1)
        sampled = self._sampler.sample(logits.flatten(0, 1), positions)
        accepted = sampled.reshape(rounds, count) == drafted
        return np.array(mx.where(is_inside, accepted, 0.0)).astype(float)

    @property
    def all_tokens(self) -> mx.array:
        """Prompt and completion, int32 [1, L]."""
        return mx.array([[*self.prompt, *self.tokens]], mx.int32)

    @cached_property
    def _sampler(self) -> Sampler:
        # Only the shape is used, so nothing is computed.
        vocab_size = self.target(mx.zeros((1, 1), mx.int32)).shape[-1]
        return Sampler(self.sampling, self.prompt, vocab_size)


def predict_accepted_lengths(acceptance_probs: Sequence[np.ndarray]) -> list[float]:
    """The predicted accepted length with 1, 2, ... K draft tokens."""
    max_draft_tokens = min((p.shape[1] for p in acceptance_probs), default=1)
    return [
        predict_accepted_length(acceptance_probs, num_draft_tokens)
        for num_draft_tokens in range(1, max_draft_tokens + 1)
    ]


def predict_accepted_length(
    acceptance_probs: Sequence[np.ndarray], num_draft_tokens: int
) -> float:
    """Predicted mean tokens per round, along completions of the target.

    A round starts where the one before it ended, so the probability that a round starts
    is propagated through the positions of a completion.

    Args:
        acceptance_probs: [L, K] per completion, of the draft tokens of a round that
            starts at each of its tokens.
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
                prob = probs[position, end - position]
                starts[end + 1] += chance * (1 - prob)
                chance *= prob
            starts[min(position + num_draft_tokens + 1, length)] += chance
        tokens += length
    return tokens / rounds if rounds else 1.0
