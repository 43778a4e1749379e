"""What changes the logits before a token is chosen: penalties, biases, constraints."""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import UserError
from .sampling import Sampling


class LogitsProcessor:
    """Penalties on what was said, in the prompt or since, biases and allowed tokens.

    The history is an array of counts [B, V], so that the next step can be launched
    before the last token is read, and drafted tokens can be counted on trial.

    Args:
        sampling: its settings of this kind; see `Sampling`.
        vocabulary: tokens that the model tells apart.

    Raises:
        UserError: a token is none of them.
    """

    def __init__(self, sampling: Sampling, vocabulary: int):
        self._sampling = sampling
        self._vocabulary = vocabulary
        named = [token for token, _ in sampling.logit_bias] + [
            *(sampling.allowed or ())
        ]
        if strange := [token for token in named if not 0 <= token < vocabulary]:
            raise UserError(
                f"the model has no token {strange[0]}: 0 to {vocabulary - 1}"
            )
        bias = [0.0] * vocabulary
        if sampling.allowed is not None:
            bias = [-float("inf")] * vocabulary
            for token in sampling.allowed:
                bias[token] = 0.0
        for token, value in sampling.logit_bias:
            bias[token] += value
        self._bias = mx.array(bias) if any(bias) else None

    @classmethod
    def needed(cls, sampling: Sampling, vocabulary: int) -> "LogitsProcessor | None":
        """One for these settings; None if they leave the logits as they are."""
        adjuster = cls(sampling, vocabulary)
        needed = adjuster._bias is not None or sampling.penalises
        return adjuster if needed else None

    def begin(self, prompts: Sequence[Sequence[int]]) -> mx.array:
        """Counts [B, V] of the tokens of prompts [B][L]."""
        counts = mx.zeros((len(prompts), self._vocabulary))
        if not self._sampling.penalises:
            return counts
        for row, prompt in enumerate(prompts):
            counts[row] = counts[row].at[mx.array(prompt)].add(1.0)
        return counts

    def count(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [B, V] after tokens [B] more."""
        if not self._sampling.penalises:
            return counts
        return counts.at[mx.arange(len(tokens)), tokens].add(1.0)

    def __call__(self, logits: mx.array, counts: mx.array) -> mx.array:
        """Logits [B, V], float32 where something changes.

        The repetition penalty is that of CTRL (arXiv 1909.05858); presence and
        frequency penalties are subtracted.
        """
        sampling, logits = self._sampling, logits.astype(mx.float32)
        if sampling.penalises:
            said, by = counts > 0, sampling.repetition_penalty
            again = mx.where(logits < 0, logits * by, logits / by)
            logits = mx.where(said, again - sampling.presence_penalty, logits)
            logits = logits - sampling.frequency_penalty * counts
        return logits if self._bias is None else logits + self._bias
