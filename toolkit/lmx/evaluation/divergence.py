"""KL divergence of a model's predictions from a reference model's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..data.batching import Batch
from ..data.sequence_mean import mean_over_sequences
from ..interfaces import SINGLE_PROCESS, Communicator
from ..models.pipeline_parallel import compile_for
from .perplexity import Perplexity, divide_batches, perplexity_of, sequence_losses


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) in nats per trained position, and agreement.

    Attributes:
        kl_stderr: of the mean, with sequences as clusters.
        kl_p99: 99th percentile over positions.
        top1_agreement: share of positions with the same most likely token.
        perplexity: that of the model, from the same pass.
        sequence_kl: summed KL of every sequence, float64 [sequences].
    """

    kl_mean: float
    kl_stderr: float
    kl_p99: float
    top1_agreement: float
    perplexity: Perplexity
    sequence_kl: np.ndarray

    @property
    def figures(self) -> dict:
        """The entries of report.json."""
        others = ("perplexity", "sequence_kl")
        return {name: v for name, v in vars(self).items() if name not in others}


def measure_divergence(
    reference: nn.Module,
    model: nn.Module,
    batches: Iterable[Batch],
    ranks: Communicator = SINGLE_PROCESS,
) -> Divergence:
    """Compare two models with the same vocabulary, in one pass of each per batch.

    Args:
        ranks: have the same models and batches; each computes its share.

    Raises:
        UserError: a prediction of `model` is NaN (exit code 1).
    """

    @compile_for(reference, model)
    def compare(tokens, mask):
        before, after = (
            m(tokens[:, :-1]).astype(mx.float32) for m in (reference, model)
        )
        p, q = nn.log_softmax(before), nn.log_softmax(after)
        kl = mx.maximum((mx.exp(p) * (p - q)).sum(axis=-1), 0.0)
        agrees = mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1)
        losses = sequence_losses(after, tokens, mask)
        return kl, agrees, *losses

    def measure(batches: Iterable[Batch]) -> Iterator[tuple]:
        for batch in batches:
            kl, agrees, *losses = map(np.array, compare(batch.tokens, batch.mask))
            kl, mask = kl.astype(np.float64), np.array(batch.mask)
            yield kl[mask], agrees[mask], (kl * mask).sum(axis=1), *losses

    results = divide_batches(batches, measure, ranks)
    perplexity = perplexity_of([losses for _, _, _, *losses in results])
    kl, agrees, sequence_kl = (
        np.concatenate(column) for column in [*zip(*results, strict=True)][:3]
    )
    mean, stderr = mean_over_sequences(sequence_kl, perplexity.sequence_tokens)
    return Divergence(
        mean,
        stderr,
        float(np.percentile(kl, 99)),
        float(agrees.mean()),
        perplexity,
        sequence_kl,
    )
