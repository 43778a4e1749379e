"""The cost of weight errors: Hessians of layer inputs and of layer outputs."""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import mlx.core as mx

from ...errors import FAILED, UserError

# Share of the output Fisher information that is replaced by a multiple of the identity.
OUTPUT_SHRINKAGE = 0.2


@dataclass(frozen=True)
class Hessian:
    """Damped second moments of a layer's inputs, and their factor.

    Attributes:
        matrix: float32 [K, K], scaled to a mean diagonal of 1.
        order: int [K], the columns by descending cost. Groups stay together: they are
            ordered by their costliest column, and the columns are ordered in a group.
        factor: float32 [K, K], upper triangular U with U'U the inverse of `matrix` in
            that order (arXiv 2210.17323, section 3).
        damping: the value added to the diagonal.
    """

    matrix: mx.array
    order: mx.array
    factor: mx.array
    damping: float

    def solve(self, rows: mx.array) -> mx.array:
        """Rows [N, K] times the inverse of the matrix."""
        ordered = rows[:, self.order] @ self.factor.T @ self.factor
        return ordered[:, mx.argsort(self.order)]


def damped(moments: mx.array, group_size: int, damping: float) -> Hessian:
    """Damp second moments by the least factor that makes them invertible.

    Args:
        moments: float32 [K, K], of any number of inputs. All zero if there were none.
        group_size: columns that share a scale.
        damping: share of the mean diagonal to start with.

    Raises:
        UserError: the moments are NaN or infinite, so no damping makes them invertible.
    """
    diagonal = mx.diagonal(moments)
    mean = diagonal.mean().item() or 1.0
    if not math.isfinite(mean):
        raise UserError(
            "the calibration data gives NaN or infinite inputs of a layer",
            hint="the model needs bfloat16 or float32 in place of float16, or is "
            "damaged",
            code=FAILED,
        )
    costs = (diagonal / mean).reshape(-1, group_size)
    groups = mx.argsort(-costs.max(axis=1))
    in_group = mx.argsort(-costs, axis=1)[groups]
    order = (groups[:, None] * group_size + in_group).reshape(-1)
    columns = mx.arange(len(moments))
    while True:
        matrix = (moments / mean).at[columns, columns].add(damping)
        factor = inverse_factor(matrix, order)
        if _is_inverse(matrix, order, factor):
            return Hessian(matrix, order, factor, damping)
        damping *= 10


def inverse_factor(matrix: mx.array, order: mx.array) -> mx.array:
    """Upper triangular U with U'U the inverse of a positive definite matrix.

    Args:
        order: permutation of rows and columns to apply first.
    """
    # With the order of the columns reversed, L L' becomes R R' with R upper triangular.
    # Its inverse is the factor: one decomposition and no full inverse.
    reverse = order[::-1]
    with mx.stream(mx.cpu):
        # Every array is as large as the matrix. Each is freed as soon as possible.
        rows = matrix[reverse]
        mx.eval(rows)
        ordered = rows[:, reverse]
        mx.eval(ordered)
        del rows
        lower = mx.linalg.cholesky(ordered)
        mx.eval(lower)
        del ordered
        factor = mx.linalg.tri_inv(lower[::-1, ::-1], upper=True)
        mx.eval(factor)
    return factor


def group_factors(matrix: mx.array, group_size: int) -> list[mx.array]:
    """The factor of the inverse of every group's Hessian, see `Hessian`."""
    columns = [
        slice(start, start + group_size) for start in range(0, len(matrix), group_size)
    ]
    order = mx.arange(group_size)
    return [inverse_factor(matrix[part, part], order) for part in columns]


def _is_inverse(matrix: mx.array, order: mx.array, factor: mx.array) -> bool:
    """Check the factor. MLX does not report a failed decomposition."""
    probe = mx.random.normal((len(matrix), 1), key=mx.random.key(0))
    solved = factor.T @ (factor @ probe)
    product = (matrix @ solved[mx.argsort(order)])[order]
    error = mx.linalg.norm(product - probe) / mx.linalg.norm(probe)
    return bool((error < 1e-2).item() and (mx.diagonal(factor) > 0).all().item())


@dataclass(frozen=True)
class OutputHessian:
    """Hessian of the loss with respect to layer outputs, for rows solved in sets.

    Attributes:
        order: int [N], the rows in the order of their sets.
        sets: slice of each set in that order.
        factor: float32 [N, N], upper triangular U with U'U the inverse of the Hessian.
    """

    order: mx.array
    sets: list[slice]
    factor: mx.array

    @classmethod
    def from_fisher(cls, fisher: mx.array, num_sets: int) -> "OutputHessian | None":
        """Shrink and factor the Fisher information; None if it is zero.

        Args:
            fisher: float32 [N, N], Fisher information of the layer outputs.
            num_sets: number of row sets, at most N. Neighboring rows, which belong to
                the same head, go to different sets.
        """
        size = len(fisher)
        mean = mx.diagonal(fisher).mean().item()
        if not mean > 0:
            return None
        num_sets = min(num_sets, size)
        sets = [mx.arange(first, size, num_sets) for first in range(num_sets)]
        order, ends = mx.concatenate(sets), accumulate(map(len, sets), initial=0)
        matrix = (1 - OUTPUT_SHRINKAGE) / mean * fisher[order][:, order]
        matrix = matrix + OUTPUT_SHRINKAGE * mx.eye(size)
        factor = inverse_factor(matrix, mx.arange(size))
        return cls(order, [slice(*pair) for pair in pairwise(ends)], factor)

    def compensation(self, index: int, errors: mx.array) -> list[mx.array]:
        """Shifts of the targets of all later sets that compensate for a set's errors.

        Args:
            errors: [n, K], quantized weights minus target.
        """
        rows, later = self.sets[index], self.sets[index + 1 :]
        with mx.stream(mx.cpu):
            inverse = mx.linalg.tri_inv(self.factor[rows, rows], upper=True)
        spread = inverse.T @ errors
        return [self.factor[rows, others].T @ spread for others in later]
