"""Losses against a teacher's predictions, as sums over trained positions."""

import mlx.core as mx

from .losses import exponentials_of
from .targets import Target


def kl_sum(
    logits: mx.array,
    target: Target,
    mask: mx.array | None = None,
    *,
    temperature: float = 1.0,
) -> mx.array:
    """Summed KL(teacher || student), in nats and float32.

    Of the tokens the target names and the rest as one outcome: never more than the KL
    over the whole vocabulary, and the same if the target names all of it.

    Args:
        logits: the student's, [B, L, V].
        target: of the same positions, at the same temperature.
        mask: bool [B, L], True where a position counts; None = everywhere.
        temperature: what the logits are divided by.
    """
    indices, log_probs, log_rest = target
    if mask is None:
        mask = mx.ones(log_rest.shape, mx.bool_)
    logits = logits.astype(mx.float32) / temperature
    return _forward_kl(logits, indices, log_probs, log_rest, mask)[0]


@mx.custom_function
def _forward_kl(logits, indices, log_probs, log_rest, mask):
    """The sum, and what its gradient needs: exponentials and their sums.

    Those of the tokens named are taken out of the others, so the rest is a sum of its
    own, exact however small it is.
    """
    largest = logits.max(axis=-1, keepdims=True)
    others = exponentials_of(logits - largest)
    named = mx.take_along_axis(others, indices, axis=-1)
    others = mx.put_along_axis(others, indices, mx.array(0.0), axis=-1)
    rest = mx.maximum(others.sum(axis=-1), 1e-37)
    total = rest + named.sum(axis=-1)
    student = mx.take_along_axis(logits - largest, indices, axis=-1)
    student = student - mx.log(total)[..., None]
    losses = _weighted(log_probs, student).sum(axis=-1)
    losses = losses + _weighted(log_rest, mx.log(rest) - mx.log(total))
    return mx.where(mask, losses, 0.0).sum(), others, named, rest, total


@_forward_kl.vjp
def _(primals, cotangents, outputs):
    """Softmax minus target; the target's rest falls to the others by their share."""
    _, indices, log_probs, log_rest, mask = primals
    _, others, named, rest, total = outputs
    weight = mx.where(mask, cotangents[0], 0.0)
    gradient = others * (weight * (1 / total - mx.exp(log_rest) / rest))[..., None]
    at_named = weight[..., None] * (named / total[..., None] - mx.exp(log_probs))
    gradient = mx.put_along_axis(gradient, indices, at_named, axis=-1)
    zeros = [mx.zeros_like(value) for value in primals[1:]]
    return gradient, *zeros


def _weighted(teacher: mx.array, student: mx.array) -> mx.array:
    """p (log p - log q) by logarithms; what is impossible costs nothing."""
    possible = teacher > -mx.inf
    teacher = mx.where(possible, teacher, 0.0)
    return mx.where(possible, mx.exp(teacher) * (teacher - student), 0.0)
