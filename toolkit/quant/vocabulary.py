"""Tokens whose rows in an embedding are alike, put together."""

import mlx.core as mx
import numpy as np

CLUSTERS = 64
ROUNDS = 10
# Second moments in memory, of all clusters together: as a share of the embedding, and
# numbers.
MOST_SHARE, MOST_NUMBERS = 4, 1 << 23
# Rows that decide where the clusters are, and rows assigned to them at once.
DECIDING, AT_ONCE = 1 << 14, 1 << 13
# Times that every token counts as seen.
UNSEEN = 0.1
LEAST = 1e-12


def clusters(weight: mx.array, counts: mx.array) -> mx.array:
    """Which cluster each row is in, by direction: k-means on the unit sphere.

    Args:
        weight: [V, K].
        counts: [V], how often each token was seen; the frequent ones are worth clusters
            of their own.

    Returns:
        int [V], of `CLUSTERS`, or fewer where matrices of that width would be large.
    """
    size, width = weight.shape
    most = min(MOST_SHARE * size * width, MOST_NUMBERS)
    number = max(1, min(CLUSTERS, most // width**2))
    counts = np.array(counts, np.float32) + UNSEEN
    # Of those seen most often.
    chosen = np.argsort(-counts, kind="stable")[:DECIDING]
    rows, counts = _directions(weight[mx.array(chosen)]), counts[chosen]
    draw, chances = np.random.default_rng(0), counts / counts.sum()
    centers = rows[draw.choice(len(rows), number, replace=False, p=chances)]
    for _ in range(ROUNDS):
        nearest = (rows @ centers.T).argmax(axis=1)
        members = (nearest == np.arange(number)[:, None]) * counts
        sums = members @ rows
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centers = np.where(lengths > 0, sums / np.maximum(lengths, LEAST), centers)
    parts = (weight[start : start + AT_ONCE] for start in range(0, size, AT_ONCE))
    nearest = [(_directions(part) @ centers.T).argmax(axis=1) for part in parts]
    return mx.array(np.unique(np.concatenate(nearest), return_inverse=True)[1])


def _directions(rows: mx.array) -> np.ndarray:
    """Rows of length one."""
    rows = np.array(rows.astype(mx.float32))
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), LEAST)
