"""Losses that maximize the acceptance rate of a draft model.

Like the divergences of `training.distillation`, they compare the target's top-k tokens
and treat all other tokens as one outcome. So they are lower bounds of the divergences
over the whole vocabulary.
"""

import mlx.core as mx
import mlx.nn as nn

from ..config.draft import DraftLossName
from ..data.batching import Batch
from ..training.distillation import (
    DIVERGENCES,
    TopKDistribution,
    divergence_sum,
    student_distribution,
    teacher_distribution,
)
from ..training.losses import cross_entropy_sum
from ..training.teacher_targets import TeacherTarget

# How early `adaptive_kl_tv` moves to total variation.
ETA = 3.0


def total_variation(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    """Terms of 1 - sum min(p, q), the rejection rate, and their gradients."""
    losses = mx.maximum(teacher.probs - student.probs, 0.0)
    return losses, mx.where(losses > 0, -student.probs, 0.0)


def adaptive_kl_tv(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    """Moves from forward KL to total variation as the acceptance rate rises.

    lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha) (arXiv 2602.23881). Here
    alpha is computed per position, so that the loss does not depend on the batch.
    """
    overlap = mx.minimum(teacher.probs, student.probs)
    weight = mx.exp(-ETA * overlap.sum(axis=-1, keepdims=True))
    pairs = zip(
        DIVERGENCES["forward_kl"](teacher, student),
        total_variation(teacher, student),
        strict=True,
    )
    losses, gradients = (weight * k + (1 - weight) * t for k, t in pairs)
    return losses, gradients


class DraftLoss:
    """The loss of a draft model, summed over trainable positions, for `TrainStep`.

    Args:
        loss: name of the divergence.
        cross_entropy: weight of the cross-entropy. The divergence has the remaining
            weight.
    """

    def __init__(self, loss: DraftLossName, *, cross_entropy: float = 0.0):
        self.measure = DIVERGENCES.get(loss) or adaptive_kl_tv
        self.cross_entropy = cross_entropy

    def labels(self, inputs, documents, target: tuple) -> tuple:
        """The arrays of a batch's target: its top-k distribution, or all log-probs."""
        return tuple(part for part in target if part is not None)

    def __call__(
        self, logits: mx.array, tokens: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The loss sum in nats of logits [..., V], with `labels` of equal positions."""
        target = (
            TeacherTarget(*labels)
            if len(labels) > 1
            else TeacherTarget(None, *labels, None)
        )
        shared = _predicted_logits(logits, target)
        loss = divergence_sum(shared, target, mask, divergence=self.measure)
        loss = (1 - self.cross_entropy) * loss
        if self.cross_entropy:
            ce = cross_entropy_sum(logits, tokens, mask)
            loss = loss + self.cross_entropy * ce
        return loss


def distribution_overlap(
    logits: mx.array, target: TeacherTarget
) -> tuple[mx.array, mx.array]:
    """Lower and upper bounds [...] of the acceptance rate sum min(p, q).

    The tokens outside the target's top k overlap by at least 0 and at most the smaller
    of both remaining probabilities. Without top k, both bounds are exact.
    """
    logits = logits.astype(mx.float32)
    student, _ = student_distribution(logits, target.indices)
    overlap = mx.minimum(teacher_distribution(target).probs, student.probs)
    upper = overlap.sum(axis=-1)
    return (upper if target.log_tail is None else upper - overlap[..., -1]), upper


def acceptance_bounds(model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
    """Bounds [B, L] of the acceptance rate of sampled draft tokens, by position."""
    target = TeacherTarget(*batch.target)
    logits = _predicted_logits(model(batch.tokens[:, :-1]), target)
    return distribution_overlap(logits, target)


def _predicted_logits(logits: mx.array, target: TeacherTarget) -> mx.array:
    """Logits of the tokens that the target predicts; the draft model may have more."""
    if target.indices is not None:
        return logits
    return logits[..., : target.log_probs.shape[-1]]
