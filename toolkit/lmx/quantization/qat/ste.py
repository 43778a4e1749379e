"""Straight-through estimators: quantization in the forward pass, a gradient in the
backward pass."""

import math
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ...models.float_formats import straight_through
from ..affine_grid import fit_grid
from ..bit_packing import pack_codes
from ..packing import dequantize

# Rounding of a position in float32, relative to the largest number it is computed from,
# with a reserve for the inexact divisions of GPUs.
POSITION_ERROR = 2.0**-20


class StraightThroughQuantizer:
    """A quantizer whose weight has the gradient of the quantized weight.

    Subclasses have `pack`.

    Attributes:
        IS_STRAIGHT_THROUGH: whether that is so everywhere, so that the backward pass
            can leave the quantizer out.
    """

    IS_STRAIGHT_THROUGH: ClassVar = True
    _spec: QuantSpec
    _dtype: mx.Dtype

    def fake_quantize(self, weight: mx.array, qparams: dict[str, mx.array]) -> mx.array:
        """The quantized weight [..., K], float32, with the identity as its gradient."""
        return straight_through(
            lambda w: dequantize(self.pack(w, qparams), self._spec, self._dtype)
        )(weight)


@dataclass(frozen=True)
class AffineSTE:
    """Affine quantization to levels scale * code + bias, codes 0 ... top, with the
    gradients of LSQ with an offset.

    Weights are [..., K] of any type. Scales and biases are float32 [M], one for each of
    the M groups in the order of the weights. They are vectors, so that weight decay and
    optimizers for matrices leave them alone.

    Attributes:
        dtype: the type in which scales and biases are stored and levels are computed.
        clip_margin: steps beyond the outermost levels where a weight still has a
            gradient.
    """

    spec: QuantSpec
    dtype: mx.Dtype
    top: int
    clip_margin: float = 0.0

    def pack(
        self, weight: mx.array, scales: mx.array, biases: mx.array
    ) -> dict[str, mx.array]:
        """Codes of the nearest levels, with scales and biases, as a checkpoint stores
        them."""
        codes = self._nearest_codes(self._positions(weight, scales, biases))
        codes = pack_codes(codes.reshape(weight.shape), self.spec.bits)
        shape = (*weight.shape[:-1], -1)
        scales, biases = (v.astype(self.dtype).reshape(shape) for v in (scales, biases))
        return {"weight": codes, "scales": scales, "biases": biases}

    def fake_quantize(
        self, weight: mx.array, scales: mx.array, biases: mx.array
    ) -> mx.array:
        """The nearest levels, float32, with the gradients of LSQ with an offset.

        With t = (w - bias) / scale (arXiv 1902.08153, 2004.09576): within the range dw
        is g, d scale sums g (code - t); beyond it dw is 0, d scale sums g code and
        d bias sums g. Those sums are scaled by 1 / sqrt(group size * top).
        """

        @mx.custom_function
        def forward(weight, scales, biases):
            packed = self.pack(weight, scales, biases)
            return dequantize(packed, self.spec, self.dtype).astype(mx.float32)

        @forward.vjp
        def _(primals, cotangent, _):
            positions = self._positions(*primals)
            codes = self._nearest_codes(positions)
            g = cotangent.reshape(positions.shape)
            margin = self.clip_margin
            inside = (positions >= -margin) & (positions <= self.top + margin)
            factor = 1 / math.sqrt(self.spec.group_size * self.top)
            d_scale = (g * mx.where(inside, codes - positions, codes)).sum(axis=-1)
            d_bias = mx.where(inside, 0.0, g).sum(axis=-1)
            d_weight = mx.where(inside, g, 0.0).reshape(cotangent.shape)
            return d_weight, factor * d_scale, factor * d_bias

        return forward(weight.astype(mx.float32), scales, biases)

    def init(self, weight: mx.array) -> tuple[mx.array, mx.array]:
        """Scales and biases of a weight with the least squared error."""
        groups = weight.astype(mx.float32).reshape(-1, self.spec.group_size)
        costs, groups = mx.ones(self.spec.group_size), mx.contiguous(groups.T)
        pair = fit_grid(groups, costs, self.top + 1.0, self.dtype)
        return tuple(v.astype(mx.float32).reshape(-1) for v in pair)

    def latent_within_cell(
        self, packed: dict[str, mx.array], key: mx.array
    ) -> mx.array:
        """Latent weights [..., K], float32, at random in the cells of their codes.

        They quantize to the codes of `packed`. As all places are as probable, an update
        by a fraction of a step changes this fraction of the codes by a step: on average
        the quantized weights follow the updates, as in stochastic rounding
        (arXiv 1502.02551). Each weight lies where it has a gradient.
        """
        pair = (packed[k].astype(mx.float32).reshape(-1) for k in ("scales", "biases"))
        scales, biases = pair
        levels = dequantize(packed, self.spec, mx.float32)
        codes = codes_as_float(packed["weight"], self.spec)
        codes = codes.reshape(-1, self.spec.group_size)
        low, high = self._cells(codes, scales, biases)
        places = mx.random.uniform(shape=codes.shape, key=key)
        positions = low + (high - low) * places
        weight = positions * scales[:, None] + biases[:, None]
        # In a group whose scale is too small beside its bias, the levels are exact.
        same = self._nearest_codes(self._positions(weight, scales, biases)) == codes
        weight = mx.where(same & (low < high), weight, levels.reshape(weight.shape))
        return weight.reshape(levels.shape)

    def _cells(self, codes, scales, biases) -> tuple[mx.array, mx.array]:
        """Ends of the cells of codes [M, group size], where weights have a gradient.

        They are so far inside that rounding does not move a weight out.
        """
        largest = mx.abs(biases / mx.where(scales == 0, 1.0, scales)) + self.top
        margin = POSITION_ERROR * largest[:, None]
        low = mx.maximum(codes - 0.5, -self.clip_margin) + margin
        high = mx.minimum(codes + 0.5, self.top + self.clip_margin) - margin
        return low, high

    def _positions(self, weight, scales, biases) -> mx.array:
        """(w - bias) / scale by group, [M, group size]."""
        groups = weight.astype(mx.float32).reshape(-1, self.spec.group_size)
        scales, biases = (
            v.astype(self.dtype).astype(mx.float32)[:, None] for v in (scales, biases)
        )
        return mx.where(scales == 0, 0.0, (groups - biases) / scales)

    def _nearest_codes(self, positions: mx.array) -> mx.array:
        return mx.clip(mx.round(positions), 0, self.top)


def codes_as_float(codes: mx.array, spec: QuantSpec) -> mx.array:
    """Packed codes [..., K * bits / 32] as float32 [..., K]."""
    width = codes.shape[-1] * 32 // spec.bits
    groups = (*codes.shape[:-1], width // spec.group_size)
    identity = {"scales": mx.ones(groups), "biases": mx.zeros(groups)}
    return dequantize({"weight": codes} | identity, spec, mx.float32)
