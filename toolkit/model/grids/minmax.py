"""MLX's own grid, made anew of the weights in every step."""

from typing import ClassVar

import mlx.core as mx

from ...quant.spec import QuantSpec, expand, pack
from .through import straight_through


class Grid:
    """Rounds as `mx.quantize` does, in every mode; has nothing to learn.

    Attributes:
        IS_STRAIGHT: whether the slope of the rounded weight is that of the weight, all
            over, so that whoever knows the one need not ask the grid.
    """

    IS_STRAIGHT: ClassVar = True

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        self._spec, self._dtype = spec, dtype

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """The learned parameters: none."""
        return {}

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32, straight through."""
        return straight_through(
            lambda w: expand(self.packed(w, learned), self._spec, self._dtype)
        )(weight)

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return pack(weight, self._spec, self._dtype)
