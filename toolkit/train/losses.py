"""Losses as sums over trained tokens; who divides decides over what."""

import mlx.core as mx


def cross_entropy_sum(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    """Summed negative log-likelihood, in nats and float32.

    Args:
        logits: [B, L, V].
        targets: int [B, L].
        mask: bool [B, L], True where the target counts.
    """
    logits = logits.astype(mx.float32)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    # Not mx.logsumexp, whose gradient takes every exponential a second time.
    largest = mx.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = mx.exp(logits - largest).sum(axis=-1)
    losses = mx.log(total) + largest.squeeze(-1) - chosen
    return mx.where(mask, losses, 0.0).sum()
