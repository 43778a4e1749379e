"""A grid that stays, whose codes are trained: above all that of a quantized model."""

from typing import ClassVar

import mlx.core as mx

from . import learned as learned_grid


class Grid(learned_grid.Grid):
    """Scales and biases of the beginning; weights move between the points they make.

    The outermost points have a cell of one step, as the others have: a weight that is
    on one moves on from there.
    """

    MARGIN: ClassVar = 0.5

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """Learns nothing; the grid of a weight is kept."""
        self._kept = super().begin(weight)
        mx.eval(self._kept)
        return {}

    def resume(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """Learns nothing; the grid that a checkpoint stores is kept."""
        self._kept = super().resume(packed)
        return {}

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32; see `Affine.rounded`."""
        return super().rounded(weight, self._kept)

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return super().packed(weight, self._kept)
