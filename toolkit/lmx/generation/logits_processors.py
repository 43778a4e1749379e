"""Logits processors: repetition penalties, logit bias and allowed tokens."""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import UserError
from .sampling import Sampling


class LogitsProcessor:
    """Applies penalties, biases and the allowed-token mask of `Sampling` to logits.

    The token history is an array of counts [B, V] owned by the caller. So the next
    step can be launched before the last token is read, and draft tokens can be counted
    tentatively.

    Args:
        sampling: `logit_bias`, `allowed_tokens` and the penalties are used.
        vocab_size: width of the logits.

    Raises:
        UserError: a token id is outside the vocabulary.
    """

    def __init__(self, sampling: Sampling, vocab_size: int):
        self._sampling = sampling
        self._vocab_size = vocab_size
        tokens = [token for token, _ in sampling.logit_bias]
        tokens += sampling.allowed_tokens or ()
        if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
            raise UserError(
                f"the model has no token {unknown[0]}: 0 to {vocab_size - 1}"
            )
        bias = [0.0] * vocab_size
        if sampling.allowed_tokens is not None:
            bias = [-float("inf")] * vocab_size
            for token in sampling.allowed_tokens:
                bias[token] = 0.0
        for token, value in sampling.logit_bias:
            bias[token] += value
        self._bias = mx.array(bias) if any(bias) else None

    @classmethod
    def create(cls, sampling: Sampling, vocab_size: int) -> "LogitsProcessor | None":
        """A processor for these settings; None if they leave the logits unchanged."""
        processor = cls(sampling, vocab_size)
        changes_logits = processor._bias is not None or sampling.has_penalties
        return processor if changes_logits else None

    def count_prompts(self, prompts: Sequence[Sequence[int]]) -> mx.array:
        """Token counts [B, V] of prompts [B][L]."""
        counts = mx.zeros((len(prompts), self._vocab_size))
        if not self._sampling.has_penalties:
            return counts
        for index, prompt in enumerate(prompts):
            counts[index] = counts[index].at[mx.array(prompt)].add(1.0)
        return counts

    def update(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [B, V] after one more token [B] per sequence."""
        if not self._sampling.has_penalties:
            return counts
        return counts.at[mx.arange(len(tokens)), tokens].add(1.0)

    def __call__(self, logits: mx.array, counts: mx.array) -> mx.array:
        """Processed logits [B, V] in float32.

        The repetition penalty is CTRL's (arXiv 1909.05858). Presence and frequency
        penalties are subtracted.
        """
        sampling, logits = self._sampling, logits.astype(mx.float32)
        if sampling.has_penalties:
            penalty = sampling.repetition_penalty
            repeated = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(counts > 0, repeated - sampling.presence_penalty, logits)
            logits = logits - sampling.frequency_penalty * counts
        return logits if self._bias is None else logits + self._bias
