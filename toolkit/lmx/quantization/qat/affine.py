"""Rounding to points scale * code + bias, and what a loss's slope says of all three."""

import math
from dataclasses import dataclass

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ..affine_grid import fit_grid
from ..packing import expand, pack, pack_codes

# Of a step: nearer to the end of its cell a weight might be rounded out of it.
EDGE = 0.01


@dataclass(frozen=True)
class AffineSTE:
    """Points of a group: scale * code + bias, for codes 0 ... top.

    Weights are [..., K] of any type; scales and biases float32 [M], one for each of the
    M groups in the order of the weights. They are vectors, so that no weight decay and
    no optimizer for matrices takes them for one.

    Attributes:
        dtype: the type scales and biases are stored in, and points are computed in.
        margin: steps beyond the outermost points where a weight still has a gradient.
    """

    spec: QuantSpec
    dtype: mx.Dtype
    top: int
    margin: float = 0.0

    def packed(
        self, weight: mx.array, scales: mx.array, biases: mx.array
    ) -> dict[str, mx.array]:
        """Codes of the nearest points with their scales and biases, as stored."""
        codes = self._nearest(self._steps(weight, scales, biases))
        codes = pack_codes(codes.reshape(weight.shape), self.spec.bits)
        shape = (*weight.shape[:-1], -1)
        scales, biases = (v.astype(self.dtype).reshape(shape) for v in (scales, biases))
        return {"weight": codes, "scales": scales, "biases": biases}

    def rounded(self, weight: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        """The nearest points, float32, with the gradients of LSQ with an offset.

        With t = (w - bias) / scale (arXiv 1902.08153, 2004.09576): within the range dw
        is g, d scale sums g (code - t); beyond it dw is 0, d scale sums g code and
        d bias sums g. Those sums are scaled by 1 / sqrt(group size * top).
        """

        @mx.custom_function
        def forward(weight, scales, biases):
            packed = self.packed(weight, scales, biases)
            return expand(packed, self.spec, self.dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            steps = self._steps(*primals)
            codes = self._nearest(steps)
            g = cotangent.reshape(steps.shape)
            inside = (steps >= -self.margin) & (steps <= self.top + self.margin)
            factor = 1 / math.sqrt(self.spec.group_size * self.top)
            by_scale = (g * mx.where(inside, codes - steps, codes)).sum(axis=-1)
            by_bias = mx.where(inside, 0.0, g).sum(axis=-1)
            by_weight = mx.where(inside, g, 0.0).reshape(cotangent.shape)
            return by_weight, factor * by_scale, factor * by_bias

        return forward(weight.astype(mx.float32), scales, biases)

    def begin(self, weight: mx.array, start: str) -> tuple[mx.array, mx.array]:
        """Scales and biases of the weights' range ("minmax"), or of least error."""
        if start == "minmax":
            packed = pack(weight, self.spec, self.dtype)
            pair = packed["scales"], packed["biases"]
        else:
            groups = weight.astype(mx.float32).reshape(-1, self.spec.group_size)
            costs, groups = mx.ones(self.spec.group_size), mx.contiguous(groups.T)
            pair = fit_grid(groups, costs, self.top + 1.0, self.dtype)
        return tuple(v.astype(mx.float32).reshape(-1) for v in pair)

    def within(self, packed: dict[str, mx.array], wished: mx.array) -> mx.array:
        """Weights [..., K], float32, that are rounded to the codes of `packed`.

        Each is as near to the one wished for as the cell of its code lets it be, and
        not so far out that it has no gradient.
        """
        pair = (packed[k].astype(mx.float32).reshape(-1) for k in ("scales", "biases"))
        scales, biases = pair
        codes = numbers(packed["weight"], self.spec)
        codes = codes.reshape(-1, self.spec.group_size)
        steps = self._steps(wished, scales, biases)
        most = 0.5 - EDGE
        steps = mx.clip(steps, codes - most, codes + most)
        steps = mx.clip(steps, EDGE - self.margin, self.top + self.margin - EDGE)
        weight = steps * scales[:, None] + biases[:, None]
        # Of a group whose bias hides its scale the points themselves are exact.
        points = expand(packed, self.spec, mx.float32).reshape(weight.shape)
        same = self._nearest(self._steps(weight, scales, biases)) == codes
        return mx.where(same, weight, points).reshape(wished.shape)

    def _steps(self, weight, scales, biases) -> mx.array:
        """How many steps of its grid every weight is above the first point, [M, g]."""
        groups = weight.astype(mx.float32).reshape(-1, self.spec.group_size)
        scales, biases = (
            v.astype(self.dtype).astype(mx.float32)[:, None] for v in (scales, biases)
        )
        return mx.where(scales == 0, 0.0, (groups - biases) / scales)

    def _nearest(self, steps: mx.array) -> mx.array:
        return mx.clip(mx.round(steps), 0, self.top)


def numbers(codes: mx.array, spec: QuantSpec) -> mx.array:
    """Packed codes [..., K * bits / 32] as float32 [..., K]."""
    width = codes.shape[-1] * 32 // spec.bits
    groups = (*codes.shape[:-1], width // spec.group_size)
    plain = {"scales": mx.ones(groups), "biases": mx.zeros(groups)}
    return expand({"weight": codes} | plain, spec, mx.float32)
