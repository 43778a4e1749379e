"""Losses against a teacher's predictions, as sums over trained positions.

They compare the probabilities of the tokens that a target names, and of the rest as one
outcome. With g the derivatives of a loss by the student's log-probabilities, q these
probabilities and G the sum of g, a named token's logit has the derivative g - q G; that
of the rest falls to the other tokens by their share of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config.train import DivergenceName, TeacherConfig
from .chunked_loss import ChunkedLossUnsupported, TrunkHeadSplit
from .document_mask import DocumentCaches
from .losses import cross_entropy_sum, exponentials_of
from .teacher_targets import TeacherTarget, full_targets

# Log-probability of what a teacher holds for impossible: no loss becomes infinite.
FLOOR = -100.0
# What is added up is not less, so that it has a logarithm.
LEAST = 1e-37


class TopKDistribution(NamedTuple):
    """Log-probabilities [..., n] of the outcomes, and probabilities."""

    logs: mx.array
    probs: mx.array


# Losses [..., n] of (teacher, student), and their derivatives by the student's logs.
Measure = Callable[[TopKDistribution, TopKDistribution], tuple[mx.array, mx.array]]


def divergence_sum(
    logits: mx.array,
    target: TeacherTarget,
    mask: mx.array | None = None,
    *,
    divergence: DivergenceName | Measure = "forward_kl",
    confidence: mx.array | float = 0.0,
    temperature: float = 1.0,
) -> mx.array:
    """Summed divergence of the student from the teacher, in nats and float32.

    With a rest, never more than over the whole vocabulary.

    Args:
        logits: the student's, [..., V].
        target: of the same positions, at the same temperature.
        mask: bool [...], True where a position counts; None = everywhere.
        divergence: KL(teacher || student), KL(student || teacher), the mean of both
            from the middle between the two, or, by confidence, a mix of both; or a
            measure of one's own.
        confidence: share of KL(student || teacher) in that mix; the mean probability
            that the teacher gives the true tokens (CAKLD, arXiv 2402.10631).
        temperature: what the logits are divided by.
    """
    measure = divergence
    if not callable(measure):
        measure = MEASURES.get(divergence) or _by_confidence(confidence)
    logits = logits.astype(mx.float32) / temperature
    if mask is None:
        mask = mx.ones(logits.shape[:-1], mx.bool_)
    return _sum(logits, target, mask, measure)


def kl_sum(
    logits: mx.array,
    target: TeacherTarget,
    mask: mx.array | None = None,
    *,
    temperature: float = 1.0,
) -> mx.array:
    """Summed KL(teacher || student); see `divergence_sum`."""
    return divergence_sum(logits, target, mask, temperature=temperature)


def _sum(logits: mx.array, target: TeacherTarget, mask: mx.array, measure: Measure):
    teacher, indices = of_teacher(target), target.indices

    @mx.custom_function
    def total(logits):
        """The sum, and what its gradient needs."""
        student, parts = of_student(logits, indices)
        losses, slopes = measure(teacher, student)
        found = mx.where(mask, losses.sum(axis=-1), 0.0).sum()
        return found, slopes, student.probs, *parts

    @total.vjp
    def _(_, cotangents, outputs):
        _, slopes, probs, *parts = outputs
        slopes = slopes * mx.where(mask, cotangents[0], 0.0)[..., None]
        whole = slopes.sum(axis=-1, keepdims=True)
        if indices is None:
            return slopes - probs * whole
        others, rest, total = parts
        share = slopes[..., -1] / rest - whole[..., 0] / total
        at_named = (slopes - probs * whole)[..., :-1]
        return mx.put_along_axis(others * share[..., None], indices, at_named, axis=-1)

    return total(logits)[0]


def of_teacher(target: TeacherTarget) -> TopKDistribution:
    """What a target names, and the rest if it has one."""
    logs = target.log_probs
    if target.log_rest is not None:
        logs = mx.concatenate([logs, target.log_rest[..., None]], axis=-1)
    logs = mx.maximum(logs, FLOOR)
    return TopKDistribution(logs, exponentials_of(logs))


def of_student(
    logits: mx.array, indices: mx.array | None
) -> tuple[TopKDistribution, tuple[mx.array, ...]]:
    """Its outcomes; with a rest also exponentials of what is no named token, and sums.

    Those of the tokens named are taken out of the others, so the rest is a sum of its
    own, exact however small it is.
    """
    logits = logits - logits.max(axis=-1, keepdims=True)
    others = exponentials_of(logits)
    if indices is None:
        total = others.sum(axis=-1, keepdims=True)
        return TopKDistribution(logits - mx.log(total), others / total), ()
    named = mx.take_along_axis(others, indices, axis=-1)
    others = mx.put_along_axis(others, indices, mx.array(0.0), axis=-1)
    rest = mx.maximum(others.sum(axis=-1), LEAST)
    total = rest + named.sum(axis=-1)
    logs = mx.take_along_axis(logits, indices, axis=-1)
    logs = mx.concatenate([logs, mx.log(rest)[..., None]], axis=-1)
    sums = mx.concatenate([named, rest[..., None]], axis=-1)
    student = TopKDistribution(logs - mx.log(total)[..., None], sums / total[..., None])
    return student, (others, rest, total)


def _forward(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    return teacher.probs * (teacher.logs - student.logs), -teacher.probs


def _reverse(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    losses = student.probs * (student.logs - teacher.logs)
    return losses, losses + student.probs


def _jensen_shannon(
    teacher: TopKDistribution, student: TopKDistribution
) -> tuple[mx.array, mx.array]:
    middle = mx.log(mx.maximum((teacher.probs + student.probs) / 2, LEAST))
    of_teacher = teacher.probs * (teacher.logs - middle)
    of_student = student.probs * (student.logs - middle)
    return (of_teacher + of_student) / 2, of_student / 2


def _by_confidence(confidence: mx.array | float) -> Measure:
    def measure(
        teacher: TopKDistribution, student: TopKDistribution
    ) -> tuple[mx.array, mx.array]:
        pairs = zip(_reverse(teacher, student), _forward(teacher, student), strict=True)
        losses, slopes = (confidence * r + (1 - confidence) * f for r, f in pairs)
        return losses, slopes

    return measure


MEASURES: dict[str, Measure] = {
    "forward_kl": _forward,
    "reverse_kl": _reverse,
    "jsd": _jensen_shannon,
}


# --- from train.teaching: The loss of a student: what its teacher predicts, mixed with the tokens alone.


class OnlineTeacher:
    """A model that runs beside its student.

    Args:
        model: gives logits of its own; never trained.
        caches: keep its attention inside the documents of packed batches.
    """

    def __init__(self, model: nn.Module, caches: DocumentCaches | None = None):
        self.model = model
        self.caches = caches
        model.freeze()
        model.eval()
        try:
            self._split = TrunkHeadSplit(model)
        except ChunkedLossUnsupported:
            self._split = None

    def look(self, inputs: mx.array, documents: mx.array | None = None) -> mx.array:
        """What `logits` are made of, [B, L, ...]: few numbers, if the model splits."""
        within = {} if documents is None else {"cache": self.caches(documents)}
        if self._split:
            return self._split.hidden(inputs, **within)
        return self.model(inputs, **within)

    def logits(self, looked: mx.array) -> mx.array:
        """Logits [..., V] of some positions [...] of what `look` gave."""
        if not self._split:
            return looked
        flat = self._split.logits(looked.reshape(-1, looked.shape[-1]))
        return flat.reshape(*looked.shape[:-1], -1)


class DistillationLoss:
    """Summed over the trained positions: the divergence from a teacher, as much as the
    cross-entropy leaves room for.

    The divergence counts times the squared temperature, which makes its gradients as
    large at any temperature (arXiv 1503.02531).

    Args:
        live: the teacher; None = batches bring its predictions along.
        confidence: see `divergence_sum`.
    """

    def __init__(
        self,
        settings: TeacherConfig,
        live: OnlineTeacher | None = None,
        confidence: float = 0.0,
    ):
        self.settings = settings
        self.live = live
        self.confidence = confidence

    def labels(
        self,
        inputs: mx.array,
        documents: mx.array | None,
        target: tuple[mx.array, ...] | None,
    ) -> tuple[mx.array, ...]:
        """What the loss needs of the teacher, [B, L, ...] each, without a gradient."""
        if self.live:
            return (mx.stop_gradient(self.live.look(inputs, documents)),)
        return target

    def __call__(
        self, logits: mx.array, targets: mx.array, mask: mx.array, *labels: mx.array
    ) -> mx.array:
        """The sum, of logits [..., V] and all others [..., ...]."""
        settings = self.settings
        shared, target = self._predicted(logits, labels)
        divergence = divergence_sum(
            shared,
            target,
            mask,
            divergence=settings.loss,
            confidence=self.confidence,
            temperature=settings.temperature,
        )
        loss = (1 - settings.ce_weight) * settings.temperature**2 * divergence
        if settings.ce_weight:
            plain = cross_entropy_sum(logits, targets, mask)
            loss = loss + settings.ce_weight * plain
        return loss

    def _predicted(
        self, logits: mx.array, labels: tuple[mx.array, ...]
    ) -> tuple[mx.array, TeacherTarget]:
        """The student's logits, and the target, of the tokens that both have."""
        if not self.live:
            return logits, TeacherTarget(*labels)
        of_teacher = self.live.logits(*labels)
        # Models of one family may fill up the vocabulary to different sizes.
        shared = min(logits.shape[-1], of_teacher.shape[-1])
        target = full_targets(of_teacher[..., :shared], self.settings.temperature)
        return logits[..., :shared], target
