"""Learning-rate schedules, weight decay and gradient clipping."""

import math

import mlx.core as mx


def learning_rate_at(
    step: int,
    steps: int,
    *,
    peak: float,
    schedule: str,
    warmup: float,
    final: float,
    decay_ratio: float = 0.2,
) -> float:
    """The learning rate of a step, counted from 0.

    Rises linearly over the first `warmup` share of the steps, then falls to `final`
    times the peak at the last step, as a cosine or a line, or stays; as
    "warmup-stable-decay" it stays up to the last `decay_ratio` of the steps, and falls
    as a line from there.
    """
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - 1 - rising)
    if schedule == "warmup-stable-decay":
        falling = max(1, min(round(decay_ratio * steps), steps - rising))
        share = min(1.0, (steps - 1 - step) / falling)
    elif schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = {"linear": 1 - done, "constant": 1.0}[schedule]
    return peak * (final + (1 - final) * share) if schedule != "constant" else peak


def decay_weights(
    parameters: dict[str, mx.array], rate: mx.array, weight_decay: float
) -> dict[str, mx.array]:
    """Decoupled weight decay (AdamW, arXiv 1711.05101) of matrices alone.

    Vectors (norms, biases) are scales and offsets, which have no reason to be small.
    """
    if not weight_decay:
        return parameters
    keep = 1 - rate * weight_decay
    return {k: v * keep if v.ndim > 1 else v for k, v in parameters.items()}


def clip_grad_norm(
    gradients: dict[str, mx.array], norm: mx.array, limit: float | None
) -> dict[str, mx.array]:
    """Scale all gradients, of a joint norm, down to one of `limit`."""
    if limit is None:
        return gradients
    scale = mx.minimum(1.0, limit / (norm + 1e-6))
    return {k: g * scale for k, g in gradients.items()}
