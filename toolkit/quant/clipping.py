"""Ranges of groups drawn in, where that loses less of what a layer puts out.

AWQ's clipping (arXiv 2306.00978, as its code has it): weights beyond the range are cut
off, and the grid of what is left is finer.
"""

import mlx.core as mx

from .spec import QuantSpec, expand, pack

# How far both ends are drawn in, as a share of them.
SHRINKS = tuple(1 - step / 20 for step in range(1, 11))
# Numbers of a weight tried at once.
AT_ONCE = 1 << 24


def group_costs(squares: mx.array, group: int) -> mx.array:
    """The second moments of every group's inputs, [G, g, g], out of all, [K, K]."""
    groups = mx.arange(len(squares) // group)
    return squares.reshape(-1, group, len(groups), group)[groups, :, groups]


def clipped(
    weight: mx.array, costs: mx.array, spec: QuantSpec, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Round a weight [N, K] on the best of the grids that drawn-in ranges have.

    Every group of a row has its own; MLX's own, of the whole range, is one of them.

    Args:
        costs: float32 [G, g, g], of `group_costs`.
        dtype: the type the checkpoint stores.

    Returns:
        What a checkpoint stores: weight (codes), scales and biases.
    """
    rows = max(1, AT_ONCE // weight.shape[1])
    parts = [
        _clipped(weight[start : start + rows], costs, spec, dtype)
        for start in range(0, len(weight), rows)
    ]
    return {k: mx.concatenate([part[k] for part in parts]) for k in parts[0]}


def _clipped(weight: mx.array, costs: mx.array, spec: QuantSpec, dtype: mx.Dtype):
    groups = weight.astype(mx.float32).reshape(len(weight), len(costs), -1)
    low, high = (f(groups, axis=-1, keepdims=True) for f in (mx.min, mx.max))
    best, least = None, None
    for shrink in (1.0, *SHRINKS):
        inside = mx.clip(groups, shrink * low, shrink * high)
        packed = pack(inside.reshape(weight.shape), spec, dtype)
        off = expand(packed, spec, dtype).reshape(groups.shape) - groups
        off = off.swapaxes(0, 1)
        error = ((off @ costs) * off).sum(axis=-1).T
        by_group = {k: v.reshape(*error.shape, -1) for k, v in packed.items()}
        if best is None:
            best, least = by_group, error
        else:
            is_better = (error < least)[..., None]
            best = {k: mx.where(is_better, by_group[k], best[k]) for k in best}
            least = mx.minimum(error, least)
        mx.eval(best, least)
    return {name: value.reshape(len(weight), -1) for name, value in best.items()}
