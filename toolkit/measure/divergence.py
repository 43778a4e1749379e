"""How far a model's predictions are from its reference's, position by position."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batches import Batch
from .perplexity import mean_over_rows


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per trained position, and agreement.

    Attributes:
        kl_stderr: of the mean, with rows as clusters.
        kl_p99: the value that 99 of 100 positions stay below.
        top1_agreement: share of positions with the same most likely token.
    """

    kl_mean: float
    kl_stderr: float
    kl_p99: float
    top1_agreement: float


def measure_divergence(
    reference: nn.Module, model: nn.Module, batches: Iterable[Batch]
) -> Divergence:
    """Compare two models with one vocabulary on the same batches."""

    @mx.compile
    def compare(tokens):
        p, q = (
            _log_softmax(m(tokens[:, :-1]).astype(mx.float32))
            for m in (reference, model)
        )
        kl = (mx.exp(p) * (p - q)).sum(axis=-1)
        return mx.maximum(kl, 0.0), mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)

    values, agreements, sums, counts = [], [], [], []
    for batch in batches:
        kl, agrees = compare(batch.tokens)
        kl, mask = np.array(kl).astype(np.float64), np.array(batch.mask)
        values.append(kl[mask])
        agreements.append(np.array(agrees)[mask])
        sums.append((kl * mask).sum(axis=1))
        counts.append(mask.sum(axis=1))
    mean, stderr = mean_over_rows(np.concatenate(sums), np.concatenate(counts))
    return Divergence(
        mean,
        stderr,
        float(np.percentile(np.concatenate(values), 99)),
        float(np.concatenate(agreements).mean()),
    )


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
