"""Losses that make guesses stand, each for every position of a target.

All are of the tokens a target names and of the rest as one outcome, so none is more
than the same loss over the whole vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx

from ..train.targets import Target
from .law import Law, law, overlap

Name = Literal["forward", "reverse", "jensen_shannon", "total_variation", "acceptance"]


def forward(found: Law, target: Target) -> mx.array:
    """KL(target || draft)."""
    return _divergence(Law(*target[1:]), found)


def reverse(found: Law, target: Target) -> mx.array:
    """KL(draft || target)."""
    return _divergence(found, Law(*target[1:]))


def jensen_shannon(found: Law, target: Target) -> mx.array:
    """Mean KL of both from the law halfway between them."""
    other = Law(*target[1:])
    half = mx.log(mx.array(0.5))
    middle = Law(
        *(half + mx.logaddexp(a, b) for a, b in zip(found, other, strict=True))
    )
    return (_divergence(other, middle) + _divergence(found, middle)) / 2


def total_variation(found: Law, target: Target) -> mx.array:
    """The share of guesses that fall, 1 - sum min(p, q)."""
    return 1 - overlap(found, target)[1]


def acceptance(found: Law, target: Target, eta: float = 3.0) -> mx.array:
    """Forward KL while guesses fall, total variation once they stand.

    lambda KL + (1 - lambda) TV with lambda = exp(-eta alpha) (arXiv 2602.23881), where
    alpha is each position's own, so that no batch changes another position's loss.
    """
    distance = total_variation(found, target)
    weight = mx.stop_gradient(mx.exp(-eta * (1 - distance)))
    return weight * forward(found, target) + (1 - weight) * distance


LOSSES: dict[str, Callable[..., mx.array]] = {
    "forward": forward,
    "reverse": reverse,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "acceptance": acceptance,
}


def loss_sum(
    logits: mx.array,
    tokens: mx.array,
    target: Target,
    mask: mx.array,
    *,
    loss: Name,
    eta: float,
    cross_entropy: float,
) -> mx.array:
    """The loss summed over positions, in nats and float32.

    Args:
        logits: the draft's, [B, L, V].
        tokens: those that came next, int [B, L].
        target: of the same positions.
        mask: bool [B, L], True where a position counts.
        cross_entropy: weight of the loss on `tokens` alone; the other has the rest.
    """
    settings = {"eta": eta} if loss == "acceptance" else {}
    losses = LOSSES[loss](law(logits, target), target, **settings)
    if cross_entropy:
        logits = logits.astype(mx.float32)
        said = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        plain = mx.logsumexp(logits, axis=-1) - said
        losses = (1 - cross_entropy) * losses + cross_entropy * plain
    return mx.where(mask, losses, 0.0).sum()


def _divergence(p: Law, q: Law) -> mx.array:
    """KL(p || q) over named outcomes and the rest; what is impossible costs nothing."""
    named = _weighted(p.named, q.named).sum(axis=-1)
    return named + _weighted(p.rest, q.rest)


def _weighted(p: mx.array, q: mx.array) -> mx.array:
    possible = mx.logical_and(p > -mx.inf, q > -mx.inf)
    p, q = (mx.where(possible, value, 0.0) for value in (p, q))
    return mx.where(possible, mx.exp(p) * (p - q), 0.0)
