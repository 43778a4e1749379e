"""Quantizers of quantization-aware training: what is trained of a weight's grid.

A quantizer has a forward pass (`fake_quantize`), the same operation as a checkpoint
stores it (`pack`), and trainable quantization parameters (`init`): float32 scales and
biases by name, or none.
"""

from typing import ClassVar

import mlx.core as mx

from ...config.qat import QATConfig
from ...config.quant_spec import FLOAT_MODES, QuantSpec
from ...models import global_scale
from ...models.float_formats import MODES
from ..bit_packing import pack_codes, unpack_codes
from ..float_grid import fit_float_groups
from ..packing import dequantize, pack
from .ste import POSITION_ERROR, AffineSTE, StraightThroughQuantizer

# Weights whose scales are searched at once: this bounds the memory.
CHUNK_WEIGHTS = 1 << 24


class FixedBlockScaleQuantizer(StraightThroughQuantizer):
    """Weights move between the elements of groups whose scales stay.

    A renewed scale, as `MinMaxQuantizer` takes it, is the least one that holds the
    largest weight, and moves all elements of a group when this weight changes. The
    initial scales here have the least squared error of a few candidates, and may clip.
    A weight beyond the largest element keeps its gradient, so that it can return. A
    global scale stays, too.
    """

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        self._spec, self._dtype = spec, dtype
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
        codes; see `AffineSTE.latent_within_cell`.

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

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        self._spec, self._dtype = spec, dtype

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """No quantization parameters."""
        return {}

    def pack(
        self, weight: mx.array, qparams: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Codes, scales and biases as a checkpoint stores them."""
        return pack(weight, self._spec, self._dtype)


class AffineQuantizer:
    """Levels of an affine grid with the gradients of `AffineSTE`."""

    IS_STRAIGHT_THROUGH: ClassVar = False
    _affine: AffineSTE

    def fake_quantize(self, weight: mx.array, qparams: dict[str, mx.array]) -> mx.array:
        """The quantized weight [..., K], float32; see `AffineSTE.fake_quantize`."""
        return self._affine.fake_quantize(weight, *self._grid(qparams))

    def pack(
        self, weight: mx.array, qparams: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """Codes, scales and biases as a checkpoint stores them."""
        return self._affine.pack(weight, *self._grid(qparams))

    def _grid(self, qparams: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        """Scales and biases of the grid."""
        return qparams["scales"], qparams["biases"]


class LSQQuantizer(AffineQuantizer):
    """Learned scale and bias of every group: LSQ with an offset (arXiv 1902.08153)."""

    CLIP_MARGIN: ClassVar = 0.0

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype):
        top = 2**spec.bits - 1
        self._affine = AffineSTE(spec, dtype, top=top, clip_margin=self.CLIP_MARGIN)

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """Initial scales and biases of a weight [..., K]."""
        scales, biases = self._affine.init(weight)
        return {"scales": scales, "biases": biases}

    def init_from_codes(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """The scales and biases that a checkpoint stores."""
        return {
            name: packed[name].astype(mx.float32).reshape(-1)
            for name in ("scales", "biases")
        }

    def latent_within_cell(
        self, packed: dict[str, mx.array], key: mx.array
    ) -> mx.array:
        """Initial latent weights; see `AffineSTE.latent_within_cell`."""
        return self._affine.latent_within_cell(packed, key)


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


QUANTIZERS = {
    "minmax": MinMaxQuantizer,
    "lsq": LSQQuantizer,
    "fixed_scale": FixedScaleQuantizer,
}
FLOAT_QUANTIZERS = {"minmax": MinMaxQuantizer, "fixed_scale": FixedBlockScaleQuantizer}


def make_quantizer(config: QATConfig, spec: QuantSpec, dtype: mx.Dtype):
    """The quantizer of a layer with this grid.

    Args:
        dtype: the type in which the export stores scales.
    """
    quantizers = FLOAT_QUANTIZERS if spec.mode in FLOAT_MODES else QUANTIZERS
    return quantizers[config.quantizer_for(spec)](spec, dtype)
