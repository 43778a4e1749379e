"""What an error in a layer's weights costs: the second moments of its inputs."""

from dataclasses import dataclass

import mlx.core as mx

from ...config.quantize import DAMPENING_FRAC


@dataclass(frozen=True)
class Hessian:
    """Second moments of a layer's inputs, damped, and their factor.

    Attributes:
        matrix: float32 [K, K], scaled so that its diagonal is 1 on average.
        order: int [K], the columns by cost, the costliest first, kept together by
            groups: inside a group, and group by group.
        factor: float32 [K, K], upper triangular U with U'U the inverse of `matrix` in
            that order (arXiv 2210.17323, section 3).
        damping: what was added to the diagonal, as a share of its mean.
    """

    matrix: mx.array
    order: mx.array
    factor: mx.array
    damping: float

    def solve(self, rows: mx.array) -> mx.array:
        """Rows [N, K] times the inverse of the matrix."""
        ordered = rows[:, self.order] @ self.factor.T @ self.factor
        return ordered[:, mx.argsort(self.order)]


def damped(moments: mx.array, group: int, damping: float = DAMPENING_FRAC) -> Hessian:
    """Make second moments fit to be inverted, with no more damping than it takes.

    Args:
        moments: float32 [K, K], of however few inputs; all zero when there was none.
        group: columns that share a grid.
        damping: the share of the mean of the diagonal to begin with.
    """
    diagonal = mx.diagonal(moments)
    mean = diagonal.mean().item() or 1.0
    order = _order(diagonal / mean, group)
    places = mx.arange(len(moments))
    while True:
        matrix = (moments / mean).at[places, places].add(damping)
        factor = inverse_factor(matrix, order)
        if _inverts(matrix, order, factor):
            return Hessian(matrix, order, factor, damping)
        damping *= 10


def _order(costs: mx.array, group: int) -> mx.array:
    costs = costs.reshape(-1, group)
    groups = mx.argsort(-costs.max(axis=1))
    inside = mx.argsort(-costs, axis=1)
    return (groups[:, None] * group + inside[groups]).reshape(-1)


def inverse_factor(matrix: mx.array, order: mx.array) -> mx.array:
    """Upper triangular U, U'U the inverse of a positive definite matrix in an order."""
    # With the order of the columns reversed, L L' becomes R R' with R upper triangular,
    # whose inverse is the factor: one decomposition and no full inverse.
    back = order[::-1]
    with mx.stream(mx.cpu):
        # Each as large as the matrix: one is let go before the one after the next.
        rows = matrix[back]
        mx.eval(rows)
        ordered = rows[:, back]
        mx.eval(ordered)
        del rows
        lower = mx.linalg.cholesky(ordered)
        mx.eval(lower)
        del ordered
        factor = mx.linalg.tri_inv(lower[::-1, ::-1], upper=True)
        mx.eval(factor)
    return factor


def _inverts(matrix: mx.array, order: mx.array, factor: mx.array) -> bool:
    """Whether the factor is one; a failed decomposition is silent in MLX."""
    probe = mx.random.normal((len(matrix), 1), key=mx.random.key(0))
    solved = factor.T @ (factor @ probe)
    back = (matrix @ solved[mx.argsort(order)])[order]
    off = mx.linalg.norm(back - probe) / mx.linalg.norm(probe)
    return bool((off < 1e-2).item() and (mx.diagonal(factor) > 0).all().item())
