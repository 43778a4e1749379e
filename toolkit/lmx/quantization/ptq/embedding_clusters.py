"""Tokens whose rows in an embedding are alike, put together."""

import mlx.core as mx

# So many clusters, if each then has so many rows on average.
CLUSTERS, LEAST_ROWS = 64, 32
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
        int [V], of `CLUSTERS`, or fewer: of few rows, or where matrices of that width
        would be large.
    """
    size, width = weight.shape
    most = min(MOST_SHARE * size * width, MOST_NUMBERS)
    number = max(1, min(CLUSTERS, size // LEAST_ROWS, most // width**2))
    # Those seen most often decide.
    chosen = mx.argsort(-counts.astype(mx.float32))[:DECIDING]
    rows, counts = _directions(weight[chosen]), counts[chosen] + UNSEEN
    # Drawn by how often they were seen, none twice.
    luck = mx.log(counts) + mx.random.gumbel(counts.shape, key=mx.random.key(0))
    centers = rows[mx.argsort(-luck)[:number]]
    for _ in range(ROUNDS):
        members = (_nearest(rows, centers) == mx.arange(number)[:, None]) * counts
        means = _directions(members @ rows)
        centers = mx.where(members.any(axis=1, keepdims=True), means, centers)
        mx.eval(centers)
    parts = (weight[start : start + AT_ONCE] for start in range(0, size, AT_ONCE))
    kinds = mx.concatenate([_nearest(_directions(part), centers) for part in parts])
    # Only clusters with members are numbered.
    members = mx.zeros(number, mx.int32).at[kinds].add(1) > 0
    return (mx.cumsum(members) - 1)[kinds]


def _nearest(rows: mx.array, centers: mx.array) -> mx.array:
    nearest = (rows @ centers.T).argmax(axis=1)
    mx.eval(nearest)
    return nearest


def _directions(rows: mx.array) -> mx.array:
    """Rows of length one."""
    rows = rows.astype(mx.float32)
    return rows / mx.maximum(mx.linalg.norm(rows, axis=1, keepdims=True), LEAST)
