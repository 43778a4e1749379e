"""Log-probabilities of tokens, and the cross-entropy summed over trained tokens."""

import mlx.core as mx

from ..cpu import on_cpu, unfused
from ..cpu.fast_exp import exp


def cross_entropy_sum(logits: mx.array, targets: mx.array, mask: mx.array) -> mx.array:
    """Summed negative log-likelihood, in nats and float32.

    Args:
        logits: [B, L, V].
        targets: int [B, L].
        mask: bool [B, L], True where the target is trained.
    """
    return _cross_entropy(logits, targets, mask)[0]


def token_log_probs(
    logits: mx.array, targets: mx.array, temperature: float = 1.0
) -> mx.array:
    """Log-probabilities of the targets, float32 [...].

    Args:
        logits: [..., V].
        targets: int [...].
        temperature: divides the logits.
    """
    logits = logits.astype(mx.float32)
    if temperature != 1:
        logits = logits / temperature
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1).squeeze(-1)
    return chosen - mx.logsumexp(logits, axis=-1)


@mx.custom_function
def _cross_entropy(logits: mx.array, targets: mx.array, mask: mx.array):
    """The sum, and what its gradient needs: exponentials and their sums."""
    logits = logits.astype(mx.float32)
    target_logits = mx.take_along_axis(logits, targets[..., None], axis=-1)
    largest = logits.max(axis=-1, keepdims=True)
    exponentials = exp_nonpositive(logits - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    losses = (mx.log(total) + largest - target_logits).squeeze(-1)
    return mx.where(mask, losses, 0.0).sum(), exponentials, total


@_cross_entropy.vjp
def _(primals, cotangents, outputs):
    logits, targets, mask = primals
    _, exponentials, total = outputs
    weight = mx.where(mask, cotangents[0], 0.0)[..., None]
    gradient = unfused(exponentials * unfused(weight / total))
    targets = targets[..., None]
    at_target = mx.take_along_axis(gradient, targets, axis=-1) - weight
    gradient = mx.put_along_axis(gradient, targets, at_target, axis=-1)
    return gradient.astype(logits.dtype), mx.zeros_like(targets), mx.zeros_like(mask)


def exp_nonpositive(x: mx.array) -> mx.array:
    """e^x of float32 values up to zero; on the CPU fast and without a gradient."""
    if not on_cpu():
        return mx.exp(x)
    return exp(unfused(x))
