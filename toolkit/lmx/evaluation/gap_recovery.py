"""The share of the loss gap between full precision and RTN that QAT recovers."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import mlx.nn as nn
import numpy as np

from ..data.batching import Batch
from ..data.sequence_mean import mean_over_sequences
from ..interfaces import SINGLE_PROCESS, Communicator
from .divergence import measure_divergence


@dataclass(frozen=True)
class PerSequenceSums:
    """Summed loss, summed KL(reference || model) and trained tokens of every sequence.

    All are float64 [sequences].
    """

    loss: np.ndarray
    kl: np.ndarray
    tokens: np.ndarray

    @property
    def means(self) -> dict[str, float]:
        """Loss and KL in nats per token, each with its standard error."""
        loss, loss_error = mean_over_sequences(self.loss, self.tokens)
        kl, kl_error = mean_over_sequences(self.kl, self.tokens)
        pairs = {"loss": loss, "loss_stderr": loss_error}
        return pairs | {"kl": kl, "kl_stderr": kl_error}


def measure_per_sequence(
    reference: nn.Module,
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: Communicator = SINGLE_PROCESS,
) -> PerSequenceSums:
    """Sums of all sequences with trained tokens, in the order of the batches."""

    result = measure_divergence(reference, model, batches, ranks)
    losses = result.perplexity
    columns = losses.sequence_losses, result.sequence_kl, losses.sequence_tokens
    return PerSequenceSums(*(column[columns[-1] > 0] for column in columns))


def gap_recovered(
    baseline: np.ndarray, rtn: np.ndarray, qat: np.ndarray
) -> tuple[float, float] | None:
    """(rtn - qat) / (rtn - baseline), and its standard error over paired sequences.

    1 is the loss of the full-precision baseline, 0 that of RTN. The standard error is
    that of a ratio of sums over sequences, to first order.

    Args:
        baseline, rtn, qat: summed losses of the same sequences: of the full-precision
            baseline, of the baseline quantized with RTN, and of the QAT model.

    Returns:
        None if RTN costs nothing: there is no gap.
    """
    recovered, gap = rtn - qat, rtn - baseline
    if gap.sum() <= 0:
        return None
    share, count = recovered.sum() / gap.sum(), len(gap)
    spread = np.sum((recovered - share * gap) ** 2) * count / max(1, count - 1)
    return float(share), sqrt(spread) / float(gap.sum())
