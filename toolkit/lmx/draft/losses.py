"""What makes guesses stand: measures beside those of `train.distillation`.

They too are of the tokens a target names and of the rest as one outcome, and so never
more than over the whole vocabulary.
"""

import mlx.core as mx
import mlx.nn as nn

from ..config.draft import DraftLossName
from ..data.batching import Batch
from ..training.distillation import (
    MEASURES,
    Measure,
    TopKDistribution,
    divergence_sum,
    of_student,
    of_teacher,
)
from ..training.losses import cross_entropy_sum
from ..training.teacher_targets import TeacherTarget


def total_variation(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    """The share of guesses that fall, 1 - sum min(p, q)."""
    losses = mx.maximum(teacher.probs - student.probs, 0.0)
    return losses, mx.where(losses > 0, -student.probs, 0.0)


def adaptive_kl_tv(eta: float) -> Measure:
    """Forward KL while guesses fall, total variation once they stand.

    lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha) (arXiv 2602.23881), where
    alpha is each position's own, so that no batch changes another position's loss.
    """

    def measure(
        teacher: TopKDistribution, student: TopKDistribution
    ) -> tuple[mx.array, mx.array]:
        shared = mx.minimum(teacher.probs, student.probs)
        weight = mx.exp(-eta * shared.sum(axis=-1, keepdims=True))
        far = MEASURES["forward_kl"](teacher, student)
        near = total_variation(teacher, student)
        pairs = zip(far, near, strict=True)
        losses, slopes = (weight * f + (1 - weight) * n for f, n in pairs)
        return losses, slopes

    return measure


class DraftLoss:
    """A draft's loss, summed over the positions that count, for `train.step.Step`.

    Args:
        loss: the measure's name.
        eta: of acceptance.
        cross_entropy: weight of the loss on the tokens that the target said; the
            measure has the rest.
    """

    def __init__(
        self, loss: DraftLossName, *, eta: float = 3.0, cross_entropy: float = 0.0
    ):
        own = {
            "total_variation": total_variation,
            "adaptive_kl_tv": adaptive_kl_tv(eta),
        }
        self.measure = (own | MEASURES)[loss]
        self.cross_entropy = cross_entropy

    def labels(self, inputs, documents, target: tuple) -> tuple:
        """What a batch brings along: a target's three parts, or all log-probs; then
        whether a token is the target's own."""
        return tuple(part for part in target if part is not None)

    def __call__(
        self, logits: mx.array, tokens: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The sum, in nats, of logits [..., V] and the `labels` of the same places."""
        *parts, own = labels
        target = (
            TeacherTarget(*parts)
            if len(parts) > 1
            else TeacherTarget(None, *parts, None)
        )
        width = logits.shape[-1]
        if target.indices is None:
            width = min(width, target.log_probs.shape[-1])
        loss = divergence_sum(
            logits[..., :width], target, mask, divergence=self.measure
        )
        loss = (1 - self.cross_entropy) * loss
        if self.cross_entropy:
            plain = cross_entropy_sum(logits, tokens, mask & own)
            loss = loss + self.cross_entropy * plain
        return loss


def distribution_overlap(
    logits: mx.array, target: TeacherTarget
) -> tuple[mx.array, mx.array]:
    """Bounds [...] of the share of drawn guesses that stand, sum min(p, q).

    What the target does not name overlaps by nothing at least, and by the smaller of
    both rests at most; a target that names all tokens gives the share itself.
    """
    logits = logits.astype(mx.float32)
    student, _ = of_student(logits, target.indices)
    shared = mx.minimum(of_teacher(target).probs, student.probs)
    most = shared.sum(axis=-1)
    return (most if target.log_rest is None else most - shared[..., -1]), most


def acceptance_bounds(model: nn.Module, lesson: Batch) -> tuple[mx.array, mx.array]:
    """Bounds [B, L] of the chance that a drawn guess stands, place by place."""
    *target, _ = lesson.target
    return distribution_overlap(model(lesson.tokens[:, :-1]), TeacherTarget(*target))
