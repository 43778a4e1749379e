"""How far a model's predictions are from its reference's, position by position."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batches import Batch


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per trained position, and agreement.

    Attributes:
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

    values, agreements = [], []
    for batch in batches:
        kl, agrees = compare(batch.tokens)
        mask = np.array(batch.mask)
        values.append(np.array(kl, np.float64)[mask])
        agreements.append(np.array(agrees)[mask])
    kl, agrees = np.concatenate(values), np.concatenate(agreements)
    return Divergence(
        float(kl.mean()),
        float(kl.std() / sqrt(len(kl))),
        float(np.percentile(kl, 99)),
        float(agrees.mean()),
    )


def _log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
