"""Learning-rate schedules, weight decay and gradient clipping."""

import math

import mlx.core as mx


def learning_rate_at(
    step: int,
    steps: int,
    *,
    peak: float,
    schedule: str,
    warmup_ratio: float,
    min_lr_ratio: float,
    decay_ratio: float = 0.2,
) -> float:
    """The learning rate of a step, counted from 0.

    It rises linearly over the first `warmup_ratio` of the steps. Then "cosine" and
    "linear" fall to `min_lr_ratio` times the peak at the last step, and "constant"
    stays. "warmup-stable-decay" stays up to the last `decay_ratio` of the steps, and
    falls linearly from there.
    """
    warmup_steps = round(warmup_ratio * steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    if schedule == "constant":
        return peak
    if schedule == "warmup-stable-decay":
        decay_steps = max(1, min(round(decay_ratio * steps), steps - warmup_steps))
        share = min(1.0, (steps - 1 - step) / decay_steps)
    elif schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = {"linear": 1 - progress}[schedule]
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * share)


def decay_weights(
    parameters: dict[str, mx.array], learning_rate: mx.array, weight_decay: float
) -> dict[str, mx.array]:
    """Decoupled weight decay (AdamW, arXiv 1711.05101) of matrices only.

    Vectors (norms, biases) are scales and offsets, which have no reason to be small.
    """
    if not weight_decay:
        return parameters
    factor = 1 - learning_rate * weight_decay
    return {
        name: value * factor if value.ndim > 1 else value
        for name, value in parameters.items()
    }


def clip_grad_norm(
    gradients: dict[str, mx.array], norm: mx.array, max_norm: float | None
) -> dict[str, mx.array]:
    """Scale all gradients so that their joint norm is at most `max_norm`."""
    if max_norm is None:
        return gradients
    scale = mx.minimum(1.0, max_norm / (norm + 1e-6))
    return {k: g * scale for k, g in gradients.items()}
