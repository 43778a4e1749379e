"""Losses against a teacher's predictions, as sums over trained positions.

They compare the probabilities of the tokens that a target names, and of the rest as one
outcome. With g the derivatives of a loss by the student's log-probabilities, q these
probabilities and G the sum of g, a named token's logit has the derivative g - q G; that
of the rest falls to the other tokens by their share of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from .losses import exponentials_of
from .targets import Target
from .teacher import Divergence

# Log-probability of what a teacher holds for impossible: no loss becomes infinite.
FLOOR = -100.0
# What is added up is not less, so that it has a logarithm.
LEAST = 1e-37


class Outcomes(NamedTuple):
    """Log-probabilities [..., n] of the outcomes, and probabilities."""

    logs: mx.array
    probs: mx.array


# Losses [..., n] of (teacher, student), and their derivatives by the student's logs.
Measure = Callable[[Outcomes, Outcomes], tuple[mx.array, mx.array]]


def divergence_sum(
    logits: mx.array,
    target: Target,
    mask: mx.array | None = None,
    *,
    divergence: Divergence = "forward",
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
            from the middle between the two, or, by confidence, a mix of both.
        confidence: share of KL(student || teacher) in that mix; the mean probability
            that the teacher gives the true tokens (CAKLD, arXiv 2402.10631).
        temperature: what the logits are divided by.
    """
    measure = MEASURES.get(divergence) or _by_confidence(confidence)
    logits = logits.astype(mx.float32) / temperature
    if mask is None:
        mask = mx.ones(logits.shape[:-1], mx.bool_)
    return _sum(logits, target, mask, measure)


def kl_sum(
    logits: mx.array,
    target: Target,
    mask: mx.array | None = None,
    *,
    temperature: float = 1.0,
) -> mx.array:
    """Summed KL(teacher || student); see `divergence_sum`."""
    return divergence_sum(logits, target, mask, temperature=temperature)


def _sum(logits: mx.array, target: Target, mask: mx.array, measure: Measure):
    teacher, indices = _teacher(target), target.indices

    @mx.custom_function
    def total(logits):
        """The sum, and what its gradient needs."""
        student, parts = _student(logits, indices)
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


def _teacher(target: Target) -> Outcomes:
    logs = target.log_probs
    if target.log_rest is not None:
        logs = mx.concatenate([logs, target.log_rest[..., None]], axis=-1)
    logs = mx.maximum(logs, FLOOR)
    return Outcomes(logs, exponentials_of(logs))


def _student(
    logits: mx.array, indices: mx.array | None
) -> tuple[Outcomes, tuple[mx.array, ...]]:
    """Its outcomes; with a rest also exponentials of what is no named token, and sums.

    Those of the tokens named are taken out of the others, so the rest is a sum of its
    own, exact however small it is.
    """
    logits = logits - logits.max(axis=-1, keepdims=True)
    others = exponentials_of(logits)
    if indices is None:
        total = others.sum(axis=-1, keepdims=True)
        return Outcomes(logits - mx.log(total), others / total), ()
    named = mx.take_along_axis(others, indices, axis=-1)
    others = mx.put_along_axis(others, indices, mx.array(0.0), axis=-1)
    rest = mx.maximum(others.sum(axis=-1), LEAST)
    total = rest + named.sum(axis=-1)
    logs = mx.take_along_axis(logits, indices, axis=-1)
    logs = mx.concatenate([logs, mx.log(rest)[..., None]], axis=-1)
    sums = mx.concatenate([named, rest[..., None]], axis=-1)
    student = Outcomes(logs - mx.log(total)[..., None], sums / total[..., None])
    return student, (others, rest, total)


def _forward(teacher: Outcomes, student: Outcomes) -> tuple[mx.array, mx.array]:
    return teacher.probs * (teacher.logs - student.logs), -teacher.probs


def _reverse(teacher: Outcomes, student: Outcomes) -> tuple[mx.array, mx.array]:
    losses = student.probs * (student.logs - teacher.logs)
    return losses, losses + student.probs


def _jensen_shannon(teacher: Outcomes, student: Outcomes) -> tuple[mx.array, mx.array]:
    middle = mx.log(mx.maximum((teacher.probs + student.probs) / 2, LEAST))
    of_teacher = teacher.probs * (teacher.logs - middle)
    of_student = student.probs * (student.logs - middle)
    return (of_teacher + of_student) / 2, of_student / 2


def _by_confidence(confidence: mx.array | float) -> Measure:
    def measure(teacher: Outcomes, student: Outcomes) -> tuple[mx.array, mx.array]:
        pairs = zip(_reverse(teacher, student), _forward(teacher, student), strict=True)
        losses, slopes = (confidence * r + (1 - confidence) * f for r, f in pairs)
        return losses, slopes

    return measure


MEASURES: dict[str, Measure] = {
    "forward": _forward,
    "reverse": _reverse,
    "jensen_shannon": _jensen_shannon,
}
