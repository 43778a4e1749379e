"""A model's distribution over what a target names, and how far two laws overlap."""

from typing import NamedTuple

import mlx.core as mx

from ..train.targets import Target

LEAST = 1e-37


class Law(NamedTuple):
    """Log-probabilities of the tokens a target names, and of all others together.

    Attributes:
        named: float32 [..., k].
        rest: float32 [...]; about -85 where nothing is left.
    """

    named: mx.array
    rest: mx.array


def law(logits: mx.array, target: Target) -> Law:
    """What logits [..., V] say of the outcomes of a target [..., k]."""
    logits = logits.astype(mx.float32)
    largest = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    others = mx.exp(logits - largest)
    named = mx.take_along_axis(others, target.indices, axis=-1)
    # Summed up by themselves: one minus the named is noise where it is small.
    zeros = mx.zeros_like(named)
    others = mx.put_along_axis(others, target.indices, zeros, axis=-1)
    rest = mx.maximum(others.sum(axis=-1), LEAST)
    total = mx.log(named.sum(axis=-1) + rest)
    chosen = mx.take_along_axis(logits - largest, target.indices, axis=-1)
    return Law(chosen - total[..., None], mx.log(rest) - total)


def overlap(found: Law, target: Target) -> tuple[mx.array, mx.array]:
    """Bounds [...] of the share of drawn guesses that stand, sum min(p, q).

    What the target does not name overlaps by nothing at least, and by the smaller of
    both rests at most; so named tokens in all of the vocabulary give the share itself.
    """
    least = mx.exp(mx.minimum(found.named, target.log_probs)).sum(axis=-1)
    return least, least + mx.exp(mx.minimum(found.rest, target.log_rest))
