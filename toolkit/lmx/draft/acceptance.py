"""Texts that a target said, for drafts to guess: what of their guesses would stand."""

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
    """What a target said to a prompt.

    Attributes:
        target: maps tokens [B, L] to logits [B, L, V].
        said: drawn by the target with `sampling`.
    """

    target: Any
    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Sampling

    def acceptance_probs(self, draft: Any) -> np.ndarray:
        """The chance [L - 1] that a guess stands at every token but the first.

        Of a token x that was drawn from p a guess from q had been accepted with
        probability min(1, q(x) / p(x)), which over all x is sum min(p, q); a greedy
        guess stands where it is x.
        """
        logits = self._logits(draft)
        if self.sampling.is_greedy:
            return np.array(mx.argmax(logits, axis=-1) == self._guessed).astype(float)
        ratio = mx.exp(self._scores(logits) - self._own_scores)
        return np.array(mx.minimum(1.0, ratio)).astype(float)

    @property
    def _guessed(self) -> mx.array:
        """The first token is no guess's."""
        return mx.array(self.tokens[1:], mx.int32)

    @cached_property
    def _own_scores(self) -> mx.array:
        scores = self._scores(self._logits(self.target))
        mx.eval(scores)
        return scores

    @cached_property
    def _choice(self) -> TargetSampler:
        # Nothing is computed where only the width is looked at.
        width = self.target(mx.zeros((1, 1), mx.int32)).shape[-1]
        return TargetSampler(self.sampling, self.prompt, width)

    def _logits(self, model: Any) -> mx.array:
        """What the tokens but the first are drawn from by a model, [L - 1, V]."""
        tokens = mx.array([[*self.prompt, *self.tokens]], mx.int32)
        logits = model(tokens)[0, len(self.prompt) : -1]
        return self._choice.process(logits, self._choice.counts)

    def _scores(self, logits: mx.array) -> mx.array:
        own = mx.take_along_axis(logits, self._guessed[:, None], axis=-1)[:, 0]
        return own - mx.logsumexp(logits, axis=-1)


def all_acceptance_probs(
    texts: Sequence[ReferenceCompletion], draft: Any
) -> list[np.ndarray]:
    """What stands of a draft's guesses, of every text that has a second token."""
    return [text.acceptance_probs(draft) for text in texts if len(text.tokens) > 1]


def predict_accepted_lengths(stands: Sequence[np.ndarray]) -> list[float]:
    """Tokens of rounds with 1, 2, ... guesses, along texts."""
    return [
        predict_accepted_length(stands, guesses)
        for guesses in range(1, MAX_DRAFT_TOKENS + 1)
    ]


def predict_accepted_length(texts: Sequence[np.ndarray], guesses: int) -> float:
    """Of rounds of so many guesses, on average, along texts of a target.

    Rounds begin where the ones before them end, so the chances of every place to be a
    beginning are followed through the text; the first token of a text is no round's.

    Args:
        texts: for every token but the first of an answer, the chance that a guess
            stands there: [L - 1] each.
    """
    tokens, rounds = 0, 0.0
    for stands in texts:
        length = len(stands)
        begins = np.zeros(length + 1)
        begins[0] = 1.0
        for place in range(length):
            chance = begins[place]
            rounds += chance
            # The round ends with the first guess that falls, or one token after all.
            for end in range(place, min(place + guesses, length)):
                begins[end + 1] += chance * (1 - stands[end])
                chance *= stands[end]
            begins[min(place + guesses + 1, length)] += chance
        tokens += length
    return tokens / rounds if rounds else 1.0
