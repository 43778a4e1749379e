"""Divergences from a teacher's predictions, summed over trained tokens.

They compare the probabilities of the tokens in a target, and the probability of all
other tokens as one more outcome (the tail). With g the derivatives of a loss with
respect to the student's log-probabilities, q these probabilities and G the sum of g,
the logit of a target's token has the derivative g - q G. That of the tail is shared
among the other tokens in proportion to their probability.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config.train import DivergenceName, TeacherConfig
from ..cpu import unfused
from ..data.batching import BatchArrays
from ..models.blockwise import NoTrunkHeadSplit, TrunkHeadSplit
from ..models.cross_entropy import cross_entropy_sum, exp_nonpositive
from .document_mask import DocumentCaches
from .losses import TokenLoss
from .teacher_targets import TeacherTarget, full_targets

# The lowest log-probability of a teacher, so that no loss is infinite.
MIN_LOG_PROB = -100.0
# The lowest sum of which a logarithm is taken.
MIN_SUM = 1e-37


class TopKDistribution(NamedTuple):
    """Log-probabilities [..., n] of the outcomes, and probabilities."""

    log_probs: mx.array
    probs: mx.array


# Losses [..., n] of (teacher, student), and their derivatives with respect to the
# student's log-probabilities.
DivergenceFn = Callable[[TopKDistribution, TopKDistribution], tuple[mx.array, mx.array]]


def divergence_sum(
    logits: mx.array,
    target: TeacherTarget,
    mask: mx.array | None = None,
    *,
    divergence: DivergenceName | DivergenceFn = "forward_kl",
    temperature: float = 1.0,
) -> mx.array:
    """Summed divergence of the student from the teacher, in nats and float32.

    With a top-k target it is never larger than over the full vocabulary.

    Args:
        logits: the student's, [..., V].
        target: of the same positions, at the same temperature.
        mask: bool [...], True where a position counts; None = everywhere.
        divergence: "forward_kl" is KL(teacher || student), "reverse_kl" is KL(student
            || teacher); or a function.
        temperature: divides the logits.
    """
    function = divergence if callable(divergence) else DIVERGENCES[divergence]
    logits = logits.astype(mx.float32) / temperature
    if mask is None:
        mask = mx.ones(logits.shape[:-1], mx.bool_)
    teacher, indices = teacher_distribution(target), target.indices

    @mx.custom_function
    def loss_sum(logits):
        """The sum, and what its gradient needs."""
        student, tail_sums = student_distribution(logits, indices)
        losses, derivatives = function(teacher, student)
        total = mx.where(mask, losses.sum(axis=-1), 0.0).sum()
        return total, derivatives, student.probs, *tail_sums

    @loss_sum.vjp
    def _(_, cotangents, outputs):
        _, derivatives, probs, *tail_sums = outputs
        weight = unfused(mx.where(mask, cotangents[0], 0.0)[..., None])
        derivatives = unfused(derivatives * weight)
        total = derivatives.sum(axis=-1, keepdims=True)
        if indices is None:
            return unfused(derivatives - unfused(probs * total))
        others, tail, exp_sum = tail_sums
        scale = derivatives[..., -1] / tail - total[..., 0] / exp_sum
        top_k = (derivatives - probs * total)[..., :-1]
        return mx.put_along_axis(others * scale[..., None], indices, top_k, axis=-1)

    return loss_sum(logits)[0]


def teacher_distribution(target: TeacherTarget) -> TopKDistribution:
    """The distribution over a target's tokens, and over the tail if it has one."""
    log_probs = target.log_probs
    if target.log_tail is not None:
        log_probs = mx.concatenate([log_probs, target.log_tail[..., None]], axis=-1)
    log_probs = mx.maximum(log_probs, MIN_LOG_PROB)
    return TopKDistribution(log_probs, exp_nonpositive(log_probs))


def student_distribution(
    logits: mx.array, indices: mx.array | None
) -> tuple[TopKDistribution, tuple[mx.array, ...]]:
    """The student's distribution over the same outcomes.

    The tail is summed over the other tokens, so that it is exact however small it is.

    Returns:
        The distribution and, with `indices`, the exponentials of all other tokens [...,
        V], their sum [...] and the sum over all tokens [...].
    """
    logits = unfused(logits - logits.max(axis=-1, keepdims=True))
    others = exp_nonpositive(logits)
    if indices is None:
        total = others.sum(axis=-1, keepdims=True)
        # Fused, the logarithm would be computed for every token.
        log_probs = unfused(logits - unfused(mx.log(total)))
        return TopKDistribution(log_probs, unfused(others / total)), ()
    top_k = mx.take_along_axis(others, indices, axis=-1)
    others = mx.put_along_axis(others, indices, mx.array(0.0), axis=-1)
    tail = mx.maximum(others.sum(axis=-1), MIN_SUM)
    total = tail + top_k.sum(axis=-1)
    logs = mx.take_along_axis(logits, indices, axis=-1)
    logs = mx.concatenate([logs, mx.log(tail)[..., None]], axis=-1)
    sums = mx.concatenate([top_k, tail[..., None]], axis=-1)
    student = TopKDistribution(logs - mx.log(total)[..., None], sums / total[..., None])
    return student, (others, tail, total)


def _forward_kl(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    return teacher.probs * (teacher.log_probs - student.log_probs), -teacher.probs


def _reverse_kl(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    losses = student.probs * (student.log_probs - teacher.log_probs)
    return losses, losses + student.probs


DIVERGENCES: dict[str, DivergenceFn] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
}


class OnlineTeacher:
    """A frozen model in memory that predicts for every batch of its student.

    Attributes:
        document_caches: keep its attention inside the documents of packed batches.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.document_caches: DocumentCaches | None = None
        model.freeze()
        model.eval()
        try:
            self._split = TrunkHeadSplit(model)
        except NoTrunkHeadSplit:
            self._split = None

    def hidden(self, inputs: mx.array, documents: mx.array | None = None) -> mx.array:
        """Inputs of `logits`, [B, L, ...]: the LM head's, or the logits themselves."""
        kwargs = {}
        if documents is not None:
            kwargs["cache"] = self.document_caches(documents)
        if self._split:
            return self._split.hidden(inputs, **kwargs)
        return self.model(inputs, **kwargs)

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits [..., V] of any positions [...] of what `hidden` returned."""
        if not self._split:
            return hidden
        flat = self._split.logits(hidden.reshape(-1, hidden.shape[-1]))
        return flat.reshape(*hidden.shape[:-1], -1)


class DistillationLoss(TokenLoss):
    """The loss against a teacher, mixed with cross-entropy, over the trained tokens.

    The divergence is multiplied by the squared temperature, which makes its gradients
    equally large at any temperature (arXiv 1503.02531).

    Args:
        online: the teacher; None = batches hold its predictions.
    """

    def __init__(self, config: TeacherConfig, online: OnlineTeacher | None = None):
        self.config = config
        self.online = online

    def labels(self, batch: BatchArrays) -> tuple[mx.array, ...]:
        """The teacher's part of the loss, [B, L, ...] each, without a gradient."""
        if self.online:
            hidden = self.online.hidden(batch.inputs, batch.documents)
            return (mx.stop_gradient(hidden),)
        return batch.target

    def from_logits(
        self, logits: mx.array, targets: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The summed loss of logits [..., V] and targets, mask, labels [..., ...]."""
        config, shared = self.config, logits
        if self.online:
            teacher_logits = self.online.logits(*labels)
            # Models of one family may pad the vocabulary to different sizes.
            size = min(logits.shape[-1], teacher_logits.shape[-1])
            target = full_targets(teacher_logits[..., :size], config.temperature)
            shared = logits[..., :size]
        else:
            target = TeacherTarget(*labels)
        divergence = divergence_sum(
            shared,
            target,
            mask,
            divergence=config.loss,
            temperature=config.temperature,
        )
        loss = (1 - config.ce_weight) * config.temperature**2 * divergence
        if config.ce_weight:
            cross_entropy = cross_entropy_sum(logits, targets, mask)
            loss = loss + config.ce_weight * cross_entropy
        return loss
