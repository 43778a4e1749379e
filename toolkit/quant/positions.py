"""Codes that can move, on a grid that can move under them."""

from dataclasses import dataclass

import mlx.core as mx

from .codes import pack_codes
from .spec import QuantSpec, expand

# Steps beyond the outermost points where a weight still has a slope: their cell.
MARGIN = 0.5


@dataclass(frozen=True)
class Positions:
    """Weights scale * round(position) + bias, positions being where codes would be.

    A weight that is on a point does not tell where the point should go, for with its
    own value it says that nothing is wrong; its code does. So positions, scales and
    biases are what is trained of a model in codes, in place of weights and a grid.

    Positions are float32 [..., K]; scales and biases [M], of the M groups in order.

    Attributes:
        dtype: the type scales and biases are stored in, and points are computed in.
    """

    spec: QuantSpec
    dtype: mx.Dtype

    @property
    def top(self) -> int:
        """The last code."""
        return 2**self.spec.bits - 1

    def start(self, packed: dict[str, mx.array]) -> mx.array:
        """The codes that a checkpoint stores."""
        shape = packed["scales"].shape
        plain = {"scales": mx.ones(shape), "biases": mx.zeros(shape)}
        return expand({"weight": packed["weight"]} | plain, self.spec, mx.float32)

    def packed(self, positions, scales, biases) -> dict[str, mx.array]:
        """What a checkpoint stores of them."""
        shape = (*positions.shape[:-1], -1)
        pair = (v.astype(self.dtype).reshape(shape) for v in (scales, biases))
        codes = pack_codes(self._codes(positions), self.spec.bits)
        return dict(zip(("weight", "scales", "biases"), (codes, *pair), strict=True))

    def rounded(self, positions, scales, biases) -> mx.array:
        """The weights as served, float32 [..., K].

        With a slope g by them: positions have g scale, and none once they are more than
        half a step beyond the points; scales have the sum of g code, biases that of g.
        """

        @mx.custom_function
        def forward(positions, scales, biases):
            packed = self.packed(positions, scales, biases)
            return expand(packed, self.spec, self.dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            positions, scales, _ = primals
            g = cotangent.reshape(-1, self.spec.group_size)
            codes = self._codes(positions).reshape(g.shape)
            has_slope = (positions >= -MARGIN) & (positions <= self.top + MARGIN)
            slopes = (g * scales[:, None]).reshape(positions.shape)
            by_position = mx.where(has_slope, slopes, 0.0)
            return by_position, (g * codes).sum(axis=-1), g.sum(axis=-1)

        return forward(positions, scales, biases)

    def _codes(self, positions: mx.array) -> mx.array:
        return mx.clip(mx.round(positions), 0, self.top)
