"""Quantizers of quantization-aware training: what is trained of a weight's grid.

A quantizer has a forward pass (`fake_quantize`), the same operation as a checkpoint
stores it (`pack`), and trainable quantization parameters (`init`): float32 scales and
biases by name, or none.
"""

import math
from typing import ClassVar

import mlx.core as mx

from ...config.qat import QATConfig
from ...config.quant_spec import FLOAT_MODES, QuantSpec
from ...cpu import on_cpu, unfused
from ...errors import UserError
from ...models import global_scale
from ...models.float_formats import MODES, straight_through
from ..affine_grid import fit_grid
from ..bit_packing import pack_codes, unpack_codes
from ..float_grid import fit_float_groups
from ..packing import dequantize, pack

# Weights whose scales are searched at once: this bounds the memory.
CHUNK_WEIGHTS = 1 << 24
# Rounding of a position in float32, relative to the largest number it is computed from,
# with a reserve for the inexact divisions of GPUs.
POSITION_ERROR = 2.0**-20
# Learning rate of fixed codes' scales, in mean scales, relative to that of norms.
SCALE_RATE = 5.0
# Iterations for the initial scales of ternary weights.
TERNARY_ITERS = 4


class StraightThroughQuantizer:
    """A quantizer whose weight has the gradient of the quantized weight.

    Subclasses have `pack`.

    Attributes:
        IS_STRAIGHT_THROUGH: whether that is so everywhere, so that the backward pass
            can leave the quantizer out.
    """

    IS_STRAIGHT_THROUGH: ClassVar = True

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        self._spec, self._dtype = spec, dtype

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """No quantization parameters."""
        return {}

    def fake_quantize(self, weight: mx.array, qparams: dict[str, mx.array]) -> mx.array:
        """The quantized weight [..., K], float32, with the identity as its gradient."""
        return straight_through(
            lambda w: dequantize(self.pack(w, qparams), self._spec, self._dtype)
        )(weight)


class FixedBlockScaleQuantizer(StraightThroughQuantizer):
    """Weights move between the elements of groups whose scales stay.

    A renewed scale, as `MinMaxQuantizer` takes it, is the least one that holds the
    largest weight, and moves all elements of a group when this weight changes. The
    initial scales here have the least squared error of a few candidates, and may clip.
    A weight beyond the largest element keeps its gradient, so that it can return. A
    global scale stays, too.
    """

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        super().__init__(spec, dtype)
        self._mode = MODES[spec.mode]
        self._scales: mx.array | None = None
        self._global_scale: mx.array | None = None

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """No quantization parameters; the scales of a weight [..., K] stay."""
        if self._spec.global_scale:
            self._global_scale = global_scale.largest_magnitude(weight)
            weight = global_scale.normalized(weight, self._global_scale)
        # The scales with the least squared error, uint8 [..., G].
        rows = weight.reshape(-1, weight.shape[-1])
        size, costs = max(1, CHUNK_WEIGHTS // rows.shape[1]), mx.ones(rows.shape[1])
        codes = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size].astype(mx.float32)
            scales = fit_float_groups(part, costs, self._spec).scales
            codes.append(self._mode.scales.codes(scales).astype(mx.uint8))
            mx.eval(codes)
        self._scales = mx.concatenate(codes).reshape(*weight.shape[:-1], -1)
        mx.eval(self._scales)
        return {}

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """No quantization parameters; the scales that a checkpoint stores stay."""
        self._scales = packed["scales"]
        self._global_scale = packed.get(global_scale.NAME)
        mx.eval(self._scales)
        return {}

    def pack(
        self, weight: mx.array, qparams: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Codes of the nearest elements, and scales, as a checkpoint stores them.

        Four-bit elements have no NaN. A group with a NaN gets the scale NaN instead, so
        that the loss shows it.
        """
        positions = self._positions(weight)
        is_nan = mx.isnan(positions).any(axis=-1)
        elements = self._nearest(mx.where(is_nan[..., None], 0.0, positions))
        codes = self._mode.elements.codes(elements).reshape(weight.shape)
        nan = mx.array(self._mode.scales.MAX_CODE + 1, mx.uint8)
        scales = mx.where(is_nan, nan, self._scales)
        packed = {"weight": pack_codes(codes, self._spec.bits), "scales": scales}
        if self._global_scale is not None:
            packed[global_scale.NAME] = self._global_scale
        return packed

    def latent_within_cell(
        self, packed: dict[str, mx.array], key: mx.array
    ) -> mx.array:
        """Initial latent weights [..., K], float32, at random in the cells of their
        codes; see `LSQQuantizer.latent_within_cell`.

        A cell reaches halfway to the elements on both sides. The ends of the cell of
        the largest element have the same distance to it.
        """
        self.init_from_codes(packed)
        levels = dequantize(packed, self._spec, mx.float32)
        codes = unpack_codes(packed["weight"], self._spec.bits)
        low, high = self._cells(codes)
        places = low + (high - low) * mx.random.uniform(shape=codes.shape, key=key)
        elements = self._mode.elements.values(codes)
        places = mx.where(elements < 0, -places, places)
        weight = self._grouped(places) * self._group_scales()[..., None]
        weight = weight.reshape(levels.shape)
        # Not so where the scale is zero, NaN, or too small for float32.
        is_same = self._nearest(self._positions(weight)) == self._grouped(elements)
        return mx.where(is_same.reshape(weight.shape), weight, levels)

    def _positions(self, weight: mx.array) -> mx.array:
        """Weights divided by their scales, float32 [..., G, group size]."""
        scales = self._group_scales()[..., None]
        groups = self._grouped(weight.astype(mx.float32))
        return mx.where(scales == 0, 0.0, groups / scales)

    def _group_scales(self) -> mx.array:
        """What the elements are multiplied by, float32 [..., G]."""
        if self._global_scale is not None:
            return global_scale.group_scales(self._scales, self._global_scale)
        return self._mode.scales.values(self._scales)

    def _grouped(self, weight: mx.array) -> mx.array:
        return weight.reshape(*weight.shape[:-1], -1, self._spec.group_size)

    def _nearest(self, positions: mx.array) -> mx.array:
        return self._mode.elements.nearest(positions, self._mode.elements.max)

    def _cells(self, codes: mx.array) -> tuple[mx.array, mx.array]:
        """Ends of the cells [..., K] of the magnitudes of codes.

        They are so far inside that rounding does not move a weight out.
        """
        number = self._mode.elements
        magnitudes = codes & (2 ** (number.bits - 1) - 1)
        value = number.values(magnitudes)
        below = number.values(mx.maximum(magnitudes, 1) - 1)
        is_largest = value == number.max
        next_codes = mx.where(is_largest, magnitudes, magnitudes + 1)
        above = mx.where(is_largest, 2 * value - below, number.values(next_codes))
        high = (value + above) / 2
        low = mx.where(value == 0, -high, (below + value) / 2)
        margin = POSITION_ERROR * high
        return low + margin, high - margin


class MinMaxQuantizer(StraightThroughQuantizer):
    """MLX's own grid of the current weights, in every mode; trains no parameters."""

    def pack(
        self, weight: mx.array, qparams: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Codes, scales and biases as a checkpoint stores them."""
        return pack(weight, self._spec, self._dtype)


class LSQQuantizer:
    """Learned scale and bias of every group: LSQ with an offset (arXiv 1902.08153).

    The levels of a group are scale * code + bias with codes 0 ... 2^bits - 1. Scales
    and biases are float32 [M], one for each of the M groups in the order of the
    weights. They are vectors, so that weight decay and optimizers for matrices leave
    them alone.

    Attributes:
        CLIP_MARGIN: steps beyond the outermost levels where a weight still has a
            gradient.
    """

    IS_STRAIGHT_THROUGH: ClassVar = False
    CLIP_MARGIN: ClassVar = 0.0

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        self._spec, self._dtype, self._top = spec, dtype, 2**spec.bits - 1

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """Scales and biases of a weight [..., K] with the least squared error."""
        groups = weight.astype(mx.float32).reshape(-1, self._spec.group_size)
        costs, groups = mx.ones(self._spec.group_size), mx.contiguous(groups.T)
        pair = fit_grid(groups, costs, self._top + 1.0, self._dtype)
        scales, biases = (v.astype(mx.float32).reshape(-1) for v in pair)
        return {"scales": scales, "biases": biases}

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """The scales and biases that a checkpoint stores."""
        return {
            name: packed[name].astype(mx.float32).reshape(-1)
            for name in ("scales", "biases")
        }

    def pack(
        self, weight: mx.array, qparams: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Codes of the nearest levels, with scales and biases, as a checkpoint stores
        them."""
        return self._pack(weight, *self._grid(qparams))

    def fake_quantize(self, weight: mx.array, qparams: dict[str, mx.array]) -> mx.array:
        """The nearest levels [..., K], float32.

        The gradients of scale and bias are scaled by 1 / sqrt(group size * largest
        code), as in LSQ.
        """

        @mx.custom_function
        def forward(weight, scales, biases):
            if on_cpu():
                return self._levels(weight, scales, biases)
            packed = self._pack(weight, scales, biases)
            return dequantize(packed, self._spec, self._dtype).astype(mx.float32)

        @forward.vjp
        def backward(primals, cotangent, _):
            # Not in common with the forward pass, which would keep the positions and
            # codes of all layers.
            primals = mx.depends([*primals], [cotangent])
            positions = self._positions(*primals)
            g = unfused(cotangent.reshape(positions.shape))
            gradients = self._gradients(g, positions, primals[1])
            d_weight, d_scale, d_bias = gradients
            d_weight = d_weight.reshape(cotangent.shape)
            factor = 1 / math.sqrt(self._spec.group_size * self._top)
            return d_weight, factor * d_scale, factor * d_bias

        if mx.issubdtype(weight.dtype, mx.floating):
            weight = weight.astype(mx.float32)
        return forward(weight, *self._grid(qparams))

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
        levels = dequantize(packed, self._spec, mx.float32)
        codes = unpack_codes(packed["weight"], self._spec.bits).astype(mx.float32)
        codes = codes.reshape(-1, self._spec.group_size)
        # The ends of the cells are so far inside that rounding does not move a weight
        # out.
        largest = mx.abs(biases / mx.where(scales == 0, 1.0, scales)) + self._top
        margin = POSITION_ERROR * largest[:, None]
        low = mx.maximum(codes - 0.5, -self.CLIP_MARGIN) + margin
        high = mx.minimum(codes + 0.5, self._top + self.CLIP_MARGIN) - margin
        places = mx.random.uniform(shape=codes.shape, key=key)
        positions = low + (high - low) * places
        weight = positions * scales[:, None] + biases[:, None]
        # In a group whose scale is too small beside its bias, the levels are exact.
        same = self._nearest_codes(self._positions(weight, scales, biases)) == codes
        weight = mx.where(same & (low < high), weight, levels.reshape(weight.shape))
        return weight.reshape(levels.shape)

    def _gradients(self, g, positions, scales) -> tuple[mx.array, mx.array, mx.array]:
        """The gradients of weights [M, group size], scales [M] and biases [M].

        With t = (w - bias) / scale (arXiv 1902.08153, 2004.09576): within the range dw
        is g, d scale sums g (code - t); beyond it dw is 0, d scale sums g code and
        d bias sums g.
        """
        codes = self._nearest_codes(positions)
        limited = self._limited(positions, self.CLIP_MARGIN)
        # As float32: the CPU has no fast choice by booleans.
        inside = unfused(mx.where(limited == positions, 1.0, 0.0))
        d_weight = unfused(g * inside)
        d_level = unfused(codes - unfused(inside * limited))
        d_scale = unfused(g * d_level).sum(axis=-1)
        return d_weight, d_scale, unfused(g - d_weight).sum(axis=-1)

    def _grid(self, qparams: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        """Scales and biases of the grid."""
        return qparams["scales"], qparams["biases"]

    def _pack(
        self, weight: mx.array, scales: mx.array, biases: mx.array
    ) -> dict[str, mx.array]:
        codes = self._nearest_codes(self._positions(weight, scales, biases))
        codes = pack_codes(codes.reshape(weight.shape), self._spec.bits)
        shape = (*weight.shape[:-1], -1)
        pair = (v.astype(self._dtype).reshape(shape) for v in (scales, biases))
        return dict(zip(("weight", "scales", "biases"), (codes, *pair), strict=True))

    def _levels(self, weight, scales, biases) -> mx.array:
        """The nearest levels [..., K], float32, as `mx.dequantize` computes them on the
        CPU: product and sum, each rounded to the dtype of the scales.

        Before it is rounded, the product of 16-bit scales is exact. Without packed
        codes this takes less than half the time.
        """
        codes = self._nearest_codes(self._positions(weight, scales, biases))
        products = self._rounded(unfused(codes * self._rounded(scales)[:, None]))
        levels = self._rounded(unfused(products + self._rounded(biases)[:, None]))
        return levels.reshape(weight.shape)

    def _positions(self, weight, scales, biases) -> mx.array:
        """(w - bias) / scale by group, [M, group size]; zero where the scale is."""
        groups = weight.astype(mx.float32).reshape(-1, self._spec.group_size)
        scales, biases = (self._rounded(v)[:, None] for v in (scales, biases))
        steps = unfused(mx.where(scales == 0, mx.inf, scales))
        return unfused(unfused(groups - biases) / steps)

    def _nearest_codes(self, positions: mx.array) -> mx.array:
        return unfused(mx.round(self._limited(positions)))

    def _limited(self, positions: mx.array, margin: float = 0.0) -> mx.array:
        """Positions, moved to at most `margin` beyond the outermost levels."""
        low, high = 0.0 - margin, self._top + margin
        positions = mx.where(positions < low, low, positions)
        return unfused(mx.where(positions > high, high, positions))

    def _rounded(self, values: mx.array) -> mx.array:
        """Float32 values that the dtype of a checkpoint has."""
        return unfused(values.astype(self._dtype).astype(mx.float32))


class FixedScaleQuantizer(LSQQuantizer):
    """Weights move between the levels of the initial grid, above all that of a
    quantized model.

    The outermost levels have a cell of one step, as the others have, so that a weight
    on an outermost level can move.
    """

    CLIP_MARGIN: ClassVar = 0.5

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """No quantization parameters; the grid of `weight` stays."""
        self._fixed = super().init(weight)
        mx.eval(self._fixed)
        return {}

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """No quantization parameters; the grid that a checkpoint stores stays."""
        self._fixed = super().init_from_codes(packed)
        return {}

    def _grid(self, qparams: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        return super()._grid(self._fixed)


class FixedCodesQuantizer(LSQQuantizer):
    """Trained scales and biases of fixed codes: E2E-QP of EfficientQAT (arXiv
    2407.11062).

    The weight is the codes of a quantized model, uint8 [..., K]. What is trained are
    changes of the stored grid: `spreads` are added to the scales, about the middle of
    the codes, and `shifts` to the middle. A scale would otherwise shift its group.
    """

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """No changes of the scales and biases that a checkpoint stores."""
        self._start = super().init_from_codes(packed)
        mx.eval(self._start)
        shape = self._start["scales"].shape
        return {"spreads": mx.zeros(shape), "shifts": mx.zeros(shape)}

    def lr_multipliers(self) -> dict[str, float]:
        """Learning-rate multipliers of quantization parameters.

        Updates are relative to the mean scale, so that they have the same size for all
        bits. The outermost levels of a group move twice as fast as its middle.
        """
        unit = SCALE_RATE * mx.abs(self._start["scales"]).mean().item()
        return {"spreads": 4 / self._top * unit, "shifts": unit}

    def _grid(self, qparams: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        spreads, start = qparams["spreads"], self._start
        shifts = qparams["shifts"] - self._top / 2 * spreads
        return start["scales"] + spreads, start["biases"] + shifts

    def _levels(self, weight, scales, biases) -> mx.array:
        codes = weight.reshape(-1, self._spec.group_size)
        if 2 * self._top > self._spec.group_size:
            return super()._levels(weight, scales, biases)
        # All levels of every group, then one look-up for each weight.
        all_codes = mx.broadcast_to(
            mx.arange(self._top + 1), (len(codes), self._top + 1)
        )
        table = super()._levels(all_codes, scales, biases)
        return mx.take_along_axis(table, codes, axis=-1).reshape(weight.shape)

    def _positions(self, weight, scales, biases) -> mx.array:
        return weight.astype(mx.float32).reshape(len(scales), -1)

    def _nearest_codes(self, positions: mx.array) -> mx.array:
        return positions

    def _gradients(self, g, positions, scales):
        # The codes have none.
        return g, unfused(g * positions).sum(axis=-1), g.sum(axis=-1)


class TernaryQuantizer(LSQQuantizer):
    """The weights -s, 0 and s, where s is learned for every group.

    BitNet b1.58 (arXiv 2402.17764) takes the mean magnitude of all weights for s. Here
    s begins with the least squared error, and is trained, as in ParetoQ (arXiv
    2502.02631). The affine codes 0, 1 and 2 with the bias -s are these weights. All
    levels have a cell of one step.
    """

    CLIP_MARGIN: ClassVar = 0.5

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        super().__init__(spec, dtype)
        self._top = 2

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """Scales of a weight [..., K], by Lloyd's algorithm."""
        groups = mx.abs(weight.astype(mx.float32)).reshape(-1, self._spec.group_size)
        # Near the least error for normal weights.
        scales = 1.5 * groups.mean(axis=-1)
        for _ in range(TERNARY_ITERS):
            is_used = groups > scales[:, None] / 2
            count = is_used.sum(axis=-1)
            scales = mx.where(is_used, groups, 0.0).sum(axis=-1) / mx.maximum(count, 1)
        return {"scales": scales}

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """The scales that a checkpoint stores.

        Raises:
            UserError: the codes are not ternary, so that training would round them.
        """
        codes = unpack_codes(packed["weight"], self._spec.bits)
        if (codes > 2).any() or (packed["biases"] != -packed["scales"]).any():
            raise UserError(
                "the 2-bit weights of this model are not ternary",
                hint="use quantizer: lsq, or start from the unquantized model",
            )
        return {"scales": super().init_from_codes(packed)["scales"]}

    def _grid(self, qparams: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        return qparams["scales"], -qparams["scales"]


QUANTIZERS = {
    "minmax": MinMaxQuantizer,
    "lsq": LSQQuantizer,
    "fixed_codes": FixedCodesQuantizer,
    "fixed_scale": FixedScaleQuantizer,
    "ternary": TernaryQuantizer,
}
FLOAT_QUANTIZERS = {"minmax": MinMaxQuantizer, "fixed_scale": FixedBlockScaleQuantizer}


def make_quantizer(config: QATConfig, spec: QuantSpec, dtype: mx.Dtype):
    """The quantizer of a layer with this grid.

    Args:
        dtype: the type in which the export stores scales.
    """
    quantizers = FLOAT_QUANTIZERS if spec.mode in FLOAT_MODES else QUANTIZERS
    return quantizers[config.quantizer_for(spec)](spec, dtype)
