"""Whether two computations of the same logits differ by more than rounding."""

import mlx.core as mx

from ..cpu import multiplies_exactly

# How far the logits of a position may be off, relative to their norm: in float32, and
# where products are rounded to bfloat16, or to TF32 on a GPU. A document moves the
# logits of SmolLM2 by .12 in bfloat16 when its positions move; a wrong mask by 2.4.
EXACT_TOLERANCE, ROUNDED_TOLERANCE = 1e-4, 0.25
# The least norm of logits to compare with.
MIN_NORM = 1e-3


def more_than_rounding(logits: mx.array, expected: mx.array) -> str | None:
    """How far logits [..., V] are off; None if rounding explains the difference."""
    is_float32 = logits.dtype == mx.float32 and expected.dtype == mx.float32
    is_exact = is_float32 and multiplies_exactly()
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    norms = mx.maximum(mx.linalg.norm(expected, axis=-1), MIN_NORM)
    error = (mx.linalg.norm(logits - expected, axis=-1) / norms).max().item()
    if error <= (EXACT_TOLERANCE if is_exact else ROUNDED_TOLERANCE):
        return None
    return f"off by {error:.0%}"
