"""Perplexity over trained tokens, with a standard error that respects the rows."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, isnan, sqrt

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batching import Batch
from ..errors import FAILED, UserError

# Logits held at once, in numbers: a quarter of a gigabyte in float32.
LOGITS = 1 << 26
# Loss whose perplexity is still a number, as JSON needs one.
LARGEST = 700.0


@dataclass(frozen=True)
class Perplexity:
    """exp(loss); `loss` is nats per trained token, `stderr` that of the perplexity."""

    value: float
    stderr: float
    loss: float
    tokens: int


def measure_perplexity(model: nn.Module, batches: Iterable[Batch]) -> Perplexity:
    """Perplexity of a model, each trained token weighing the same.

    The standard error is that of a ratio of sums over independent rows: tokens of one
    row are alike, so counting them as independent would promise too much.

    Raises:
        UserError: a prediction is not a number (exit code 1).
    """

    @mx.compile
    def row_losses(tokens, mask):
        logits = model(tokens[:, :-1]).astype(mx.float32)
        chosen = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1).squeeze(-1)
        losses = mx.where(mask, mx.logsumexp(logits, axis=-1) - chosen, 0.0)
        return losses.sum(axis=1), mask.sum(axis=1)

    # np.array waits for each batch, so that only one is in memory.
    pairs = [
        [np.array(sums, np.float64) for sums in row_losses(batch.tokens, batch.mask)]
        for batch in batches
    ]
    losses, counts = (np.concatenate(sums) for sums in zip(*pairs, strict=True))
    mean, stderr = mean_over_rows(losses, counts)
    if isnan(mean):
        raise UserError(
            "the model's predictions are not numbers",
            hint="its weights are damaged, or too large for the type it computes in",
            code=FAILED,
        )
    value = exp(min(mean, LARGEST))
    return Perplexity(value, value * stderr, mean, int(counts.sum()))


def mean_over_rows(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean per token, and its standard error with rows as clusters.

    Args:
        sums: of the tokens of each row.
        counts: tokens of each row; rows without any do not matter.
    """
    mean = sums.sum() / counts.sum()
    rows = np.count_nonzero(counts)
    spread = np.sum((sums - mean * counts)[counts > 0] ** 2)
    stderr = sqrt(spread * rows / max(1, rows - 1)) / counts.sum()
    return float(mean), float(stderr)


def tokens_at_once(vocabulary: int) -> int:
    """Tokens of a measuring batch, so that its logits stay small."""
    return max(1, LOGITS // vocabulary)
