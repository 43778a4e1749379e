"""Scales and biases that are trained with the weights: LSQ with an offset."""

from typing import ClassVar

import mlx.core as mx

from ...quant.spec import QuantSpec
from .affine import Affine


class Grid:
    """A scale and a bias of every group, as masters in float32."""

    IS_STRAIGHT: ClassVar = False
    MARGIN: ClassVar = 0.0

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        top = 2**spec.bits - 1
        self._affine = Affine(spec, dtype, top=top, margin=self.MARGIN)
        self._start = start

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """The first scales and biases of a weight [..., K]."""
        scales, biases = self._affine.begin(weight, self._start)
        return {"scales": scales, "biases": biases}

    def resume(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """The scales and biases that a checkpoint stores."""
        return {
            name: packed[name].astype(mx.float32).reshape(-1)
            for name in ("scales", "biases")
        }

    def within(self, packed: dict[str, mx.array], wished: mx.array) -> mx.array:
        """Weights that round to the stored codes, near others; see `Affine.within`."""
        return self._affine.within(packed, wished)

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32; see `Affine.rounded`."""
        return self._affine.rounded(weight, **learned)

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return self._affine.packed(weight, **learned)
