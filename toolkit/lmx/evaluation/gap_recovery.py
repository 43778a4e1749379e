"""What of the loss that rounding costs a training has won back."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batching import Batch
from .perplexity import mean_over_rows


@dataclass(frozen=True)
class PerSequenceSums:
    """Of a model, float64 [rows]: summed loss, KL(reference || model), and tokens."""

    loss: np.ndarray
    kl: np.ndarray
    tokens: np.ndarray

    @property
    def means(self) -> dict[str, float]:
        """Loss and KL in nats per token, each with its standard error by rows."""
        loss, loss_error = mean_over_rows(self.loss, self.tokens)
        kl, kl_error = mean_over_rows(self.kl, self.tokens)
        pairs = {"loss": loss, "loss_stderr": loss_error}
        return pairs | {"kl": kl, "kl_stderr": kl_error}


def measure_per_sequence(
    reference: nn.Module, model: nn.Module, batches: Iterable[Batch]
) -> PerSequenceSums:
    """Sums over the trained tokens of every row that has some, in their order."""

    @mx.compile
    def sums(tokens, mask):
        p, q = (
            nn.log_softmax(m(tokens[:, :-1]).astype(mx.float32))
            for m in (reference, model)
        )
        chosen = mx.take_along_axis(q, tokens[:, 1:, None], axis=-1).squeeze(-1)
        kl = (mx.exp(p) * (p - q)).sum(axis=-1)
        parts = mx.where(mask, -chosen, 0.0), mx.where(mask, kl, 0.0), mask
        return [part.sum(axis=1) for part in parts]

    found = [
        [np.array(part, np.float64) for part in sums(batch.tokens, batch.mask)]
        for batch in batches
    ]
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    return PerSequenceSums(*(column[columns[-1] > 0] for column in columns))


def gap_recovered(
    full: np.ndarray, rounded: np.ndarray, trained: np.ndarray
) -> tuple[float, float] | None:
    """(rounded - trained) / (rounded - full), and its standard error by rows in pairs.

    1 is the full model's own, 0 no better than rounding. The error is that of a ratio
    of sums over rows, to first order.

    Args:
        full, rounded, trained: sums of the same rows: of the model in full precision,
            of that model rounded, and of the one that was trained for rounding.

    Returns:
        None where rounding costs nothing, for there is nothing to recover.
    """
    won, cost = rounded - trained, rounded - full
    if cost.sum() <= 0:
        return None
    share, rows = won.sum() / cost.sum(), len(cost)
    spread = np.sum((won - share * cost) ** 2) * rows / max(1, rows - 1)
    return float(share), sqrt(spread) / float(cost.sum())
