"""Weights with the groups that break a block type."""

import mlx.core as mx


def awkward_weights(rows=37, width=512, seed=0) -> mx.array:
    """Rows that are no multiple of 64, and groups and blocks of one value or sign."""
    weight = 0.02 * mx.random.normal((rows, width), key=mx.random.key(seed))
    weight[0] = 0
    weight[1, :256] = 0
    weight[2, 32:80] = 0
    weight[3, :32] = mx.abs(weight[3, :32])
    weight[4, :256] = -mx.abs(weight[4, :256])
    weight[5, :256] = 0.5
    weight[6, :256] = -0.5
    weight[7, 3] = 100.0
    weight[8] = mx.round(weight[8] / 0.03) * 0.25
    weight[9] *= 1e-3
    return weight
