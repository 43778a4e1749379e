"""KL divergence of a model's predictions from a reference model's."""

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batching import Batch
from ..data.sequence_mean import mean_over_sequences
from .perplexity import Perplexity, perplexity_of, sequence_losses

# The same for all runs, so that histograms are comparable.
KL_EDGES = tuple(10.0**power for power in np.arange(-6, 1.25, 0.25).tolist())
CONFIDENCE_EDGES = tuple(tenth / 10 for tenth in range(11))


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per trained position, and agreement.

    Attributes:
        kl_stderr: of the mean, with sequences as clusters.
        kl_p99: 99th percentile over positions.
        top1_agreement: share of positions with the same most likely token.
        kl_histogram: `edges`, n, and `positions`, n - 1; the first and the last bin
            include values outside the edges.
        agreement_by_confidence: `edges` of the reference's largest probability, n;
            `positions` per bin, and `agreed` of them, n - 1 each.
        perplexity: that of the model, from the same pass.
        sequence_kl: summed KL of every sequence, float64 [sequences].
    """

    kl_mean: float
    kl_stderr: float
    kl_p99: float
    top1_agreement: float
    kl_histogram: dict[str, list]
    agreement_by_confidence: dict[str, list]
    perplexity: Perplexity
    sequence_kl: np.ndarray

    @property
    def figures(self) -> dict:
        """The entries of report.json."""
        others = ("perplexity", "sequence_kl")
        return {name: v for name, v in vars(self).items() if name not in others}


def measure_divergence(
    reference: nn.Module, model: nn.Module, batches: Iterable[Batch]
) -> Divergence:
    """Compare two models with the same vocabulary, in one pass of each per batch.

    Raises:
        UserError: a prediction of `model` is NaN (exit code 1).
    """

    @mx.compile
    def compare(tokens, mask):
        before, after = (
            m(tokens[:, :-1]).astype(mx.float32) for m in (reference, model)
        )
        p, q = nn.log_softmax(before), nn.log_softmax(after)
        kl = mx.maximum((mx.exp(p) * (p - q)).sum(axis=-1), 0.0)
        agrees = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
        losses = sequence_losses(after, tokens, mask)
        return kl, agrees, mx.exp(p.max(axis=-1)), *losses

    parts, sums, losses = [], [], []
    for batch in batches:
        kl, agrees, confidence, *loss = map(np.array, compare(batch.tokens, batch.mask))
        kl, mask = kl.astype(np.float64), np.array(batch.mask)
        parts.append((kl[mask], agrees[mask], confidence[mask]))
        sums.append((kl * mask).sum(axis=1))
        losses.append(loss)
    perplexity, sequence_kl = perplexity_of(losses), np.concatenate(sums)
    mean, stderr = mean_over_sequences(sequence_kl, perplexity.sequence_tokens)
    kl, agrees, confidence = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Divergence(
        mean,
        stderr,
        float(np.percentile(kl, 99)),
        float(agrees.mean()),
        {"edges": [*KL_EDGES], "positions": _counts(kl, KL_EDGES)},
        {
            "edges": [*CONFIDENCE_EDGES],
            "positions": _counts(confidence, CONFIDENCE_EDGES),
            "agreed": _counts(confidence[agrees], CONFIDENCE_EDGES),
        },
        perplexity,
        sequence_kl,
    )


def _counts(values: np.ndarray, edges: tuple[float, ...]) -> list[int]:
    clipped = np.clip(values, edges[0], edges[-1])
    return np.histogram(clipped, edges)[0].tolist()
