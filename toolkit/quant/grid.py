"""The grid of a group: scale and bias that lose least, weighted by importance."""

import mlx.core as mx

# How far the ends of the weights' range are drawn in, as a share of it.
SHRINKS = (0.96, 0.92, 0.88, 0.83, 0.78, 0.72, 0.65, 0.57, 0.48, 0.38)
ROUNDS = 5


def nearest(
    weight: mx.array, scale: mx.array, bias: mx.array, levels: mx.array
) -> mx.array:
    """Codes 0 ... levels - 1, as floats, of the nearest points scale * code + bias."""
    inverse = mx.where(scale == 0, 0.0, 1 / scale)
    return mx.clip(mx.round((weight - bias) * inverse), 0, levels - 1)


def fit_grid(
    weight: mx.array, cost: mx.array, levels: mx.array, dtype: mx.Dtype
) -> tuple[mx.array, mx.array]:
    """Scales and biases of rows that are one group each.

    The best of many starts, the range from the smallest to the largest weight among
    them, is improved by least squares: codes for the grid, then the grid for the codes.
    Every grid is judged as it will be stored, so none is worse than the plain range.

    Args:
        weight: float32 [N, g].
        cost: float32 [g], of a squared error in each column.
        levels: float32 [], codes of the grid.
        dtype: the type scales and biases are stored in.

    Returns:
        Both float32 [N], of values that `dtype` has.
    """
    low, high = weight.min(axis=-1), weight.max(axis=-1)
    scale = (high - low) / (levels - 1)
    scale, bias = _storable(scale, low, dtype)
    best = _error(weight, cost, scale, bias, levels), scale, bias
    for shrink in SHRINKS:
        tried = _storable(shrink * scale, shrink * low, dtype)
        best = _better(weight, cost, levels, *best, *tried)
    for _ in range(ROUNDS):
        tried = _storable(*_least_squares(weight, cost, levels, *best[1:]), dtype)
        best = _better(weight, cost, levels, *best, *tried)
    return best[1:]


def _storable(scale: mx.array, bias: mx.array, dtype: mx.Dtype):
    return tuple(v.astype(dtype).astype(mx.float32) for v in (scale, bias))


@mx.compile
def _error(weight, cost, scale, bias, levels):
    codes = nearest(weight, scale[:, None], bias[:, None], levels)
    off = codes * scale[:, None] + bias[:, None] - weight
    return (off * off * cost).sum(axis=-1)


@mx.compile
def _better(weight, cost, levels, least, scale, bias, other_scale, other_bias):
    error = _error(weight, cost, other_scale, other_bias, levels)
    is_better = error < least
    pairs = ((error, least), (other_scale, scale), (other_bias, bias))
    return tuple(mx.where(is_better, new, old) for new, old in pairs)


@mx.compile
def _least_squares(weight, cost, levels, scale, bias):
    """The best grid for the codes that a grid gives."""
    codes = nearest(weight, scale[:, None], bias[:, None], levels)
    share = cost / cost.sum()
    mean_code = (share * codes).sum(axis=-1, keepdims=True)
    mean = (share * weight).sum(axis=-1, keepdims=True)
    spread = (share * (codes - mean_code) ** 2).sum(axis=-1)
    together = (share * (codes - mean_code) * (weight - mean)).sum(axis=-1)
    # Where all codes are one, the scale is free and the bias alone decides.
    is_flat = spread == 0
    fitted = mx.where(is_flat, scale, together / mx.where(is_flat, 1.0, spread))
    return fitted, mean[:, 0] - fitted * mean_code[:, 0]
