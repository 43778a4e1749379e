"""Perplexity over trained tokens, with a standard error over sequences."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, isnan

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batching import Batch, rows_of
from ..data.sequence_mean import mean_over_sequences
from ..errors import nan_predictions
from ..interfaces import SINGLE_PROCESS, Communicator
from ..models.pipeline_parallel import compile_for

# Logits in memory at once: 256 MB in float32.
MAX_LOGITS = 1 << 26
# Largest loss whose exponential is finite, as JSON requires.
MAX_LOSS = 700.0


@dataclass(frozen=True)
class Perplexity:
    """exp(loss); `loss` is nats per trained token, `stderr` that of the perplexity.

    Attributes:
        sequence_losses: summed loss of every sequence, float64 [sequences].
        sequence_tokens: its trained tokens.
    """

    value: float
    stderr: float
    loss: float
    tokens: int
    sequence_losses: np.ndarray
    sequence_tokens: np.ndarray

    def ratio_to(self, reference: "Perplexity") -> tuple[float, float]:
        """The ratio to the perplexity of another model, and its standard error.

        Both are measured on the same sequences. The error is that of the paired
        difference in loss, so what makes a sequence hard for both models cancels.
        """
        difference = self.sequence_losses - reference.sequence_losses
        _, stderr = mean_over_sequences(difference, self.sequence_tokens)
        ratio = self.value / reference.value
        return ratio, ratio * stderr


def sequence_losses(
    logits: mx.array, tokens: mx.array, mask: mx.array
) -> tuple[mx.array, mx.array]:
    """Summed loss and trained tokens of every sequence, from float32 logits [B, L, V].

    Args:
        tokens: [B, L + 1].
        mask: the trained positions, [B, L].
    """
    chosen = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1).squeeze(-1)
    losses = mx.where(mask, mx.logsumexp(logits, axis=-1) - chosen, 0.0)
    return losses.sum(axis=1), mask.sum(axis=1)


def divide_batches(
    batches: Iterable[Batch],
    work: Callable[[Iterable[Batch]], Iterator[tuple]],
    ranks: Communicator,
) -> list[tuple]:
    """The results of parts of the batches, in order; each is made by one rank.

    A rank gets some sequences of every batch, so that few batches keep all ranks busy.
    """
    parts = (part for batch in batches for part in rows_of(batch, ranks.size))
    return ranks.divide(parts, work)


def measure_perplexity(
    model: nn.Module, batches: Iterable[Batch], ranks: Communicator = SINGLE_PROCESS
) -> Perplexity:
    """Perplexity of a model, with equal weight for every trained token.

    The standard error is that of a ratio of sums over independent sequences: tokens of
    one sequence are correlated, so independent tokens would underestimate it.

    Args:
        ranks: have the same model and batches; each computes its share.

    Raises:
        UserError: a prediction is NaN (exit code 1).
    """

    @compile_for(model)
    def sums(tokens, mask):
        return sequence_losses(model(tokens[:, :-1]).astype(mx.float32), tokens, mask)

    def measure(batches: Iterable[Batch]) -> Iterator[tuple]:
        for batch in batches:
            # np.array waits for every batch, so that only one is in memory.
            yield tuple(map(np.array, sums(batch.tokens, batch.mask)))

    return perplexity_of(divide_batches(batches, measure, ranks))


def perplexity_of(sums: Sequence[tuple]) -> Perplexity:
    """The perplexity of batches, from the `sequence_losses` of each; else as above."""
    losses, counts = (
        np.concatenate(column).astype(np.float64) for column in zip(*sums, strict=True)
    )
    mean, stderr = mean_over_sequences(losses, counts)
    if isnan(mean):
        raise nan_predictions("the model")
    value = exp(min(mean, MAX_LOSS))
    return Perplexity(value, value * stderr, mean, int(counts.sum()), losses, counts)


def eval_batch_tokens(vocab_size: int) -> int:
    """Tokens per batch, so that the logits stay within `MAX_LOGITS`."""
    return max(1, MAX_LOGITS // vocab_size)
