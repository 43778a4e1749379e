"""Codes that stay, with scales and biases that are trained (arXiv 2407.11062)."""

import mlx.core as mx

from ...quant.spec import QuantSpec, expand
from . import learned as learned_grid
from .affine import numbers


class Grid(learned_grid.Grid):
    """A learned grid without weights: its codes are those of the beginning.

    Attributes:
        codes: packed, uint32 [..., K * bits / 32]; there once `begin` or `resume` ran.
    """

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        super().__init__(spec, dtype, start)
        self._spec, self._dtype = spec, dtype
        self.codes: mx.array | None = None

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """The first scales and biases of a weight, whose codes for them are kept."""
        learned = super().begin(weight)
        self.codes = super().packed(weight, learned)["weight"]
        mx.eval(self.codes)
        return learned

    def resume(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """The scales and biases that a checkpoint stores, whose codes are kept."""
        self.codes = packed["weight"]
        return super().resume(packed)

    def rounded(self, weight: None, learned: dict[str, mx.array]) -> mx.array:
        """What the codes stand for [..., K], float32.

        The slope of a scale is the sum of g * code, that of a bias the sum of g.
        """

        @mx.custom_function
        def forward(scales, biases):
            packed = self.packed(weight, {"scales": scales, "biases": biases})
            return expand(packed, self._spec, self._dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            g = cotangent.reshape(-1, self._spec.group_size)
            codes = numbers(self.codes, self._spec).reshape(g.shape)
            return (g * codes).sum(axis=-1), g.sum(axis=-1)

        return forward(learned["scales"], learned["biases"])

    def packed(self, weight: None, learned: dict[str, mx.array]) -> dict[str, mx.array]:
        """What a checkpoint stores."""
        shape = (*self.codes.shape[:-1], -1)
        pair = {k: v.astype(self._dtype).reshape(shape) for k, v in learned.items()}
        return {"weight": self.codes} | pair
