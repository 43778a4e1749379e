"""The best grid of every row among candidates, by the error of the layer's output."""

import mlx.core as mx

from ...affine_grid import AffineGrid
from ...float_grid import FloatGrid
from ...gguf_grid import GGUFGrid


class BestGridTracker:
    """Keeps the best grid of every row.

    Attributes:
        grid: the best rows so far.
        errors: float32 [N], squared output error of each row of `grid`.
        descent: float32 [N, K], minus half the gradient of these errors with respect
            to the weight.
        candidates: errors [N] of each candidate by name.
        output: float32 [N], squared norm of the outputs of the target.
    """

    def __init__(self, target: mx.array, matrix: mx.array, dtype: mx.Dtype):
        self.target = target
        self.matrix = matrix
        self.dtype = dtype
        self.candidates: dict[str, mx.array] = {}
        self.output = ((target @ matrix) * target).sum(axis=1)
        self.errors: mx.array | None = None

    def add(self, name: str, grid: AffineGrid | FloatGrid | GGUFGrid) -> None:
        """Evaluate a grid as it is stored."""
        difference = self.target - grid.weight(self.dtype)
        descent = difference @ self.matrix
        errors = (descent * difference).sum(axis=1)
        # A row with NaN is worse than any other.
        errors = mx.where(mx.isnan(errors), mx.inf, errors)
        self.candidates[name] = errors
        if self.errors is None:
            self.grid, self.errors, self.descent = grid, errors, descent
        else:
            is_better = errors < self.errors
            self.grid = grid.over(self.grid, is_better)
            self.errors = mx.minimum(errors, self.errors)
            self.descent = mx.where(is_better[:, None], descent, self.descent)
        mx.eval(errors, self.errors, self.descent, vars(self.grid))
