"""Quantizers of QAT for MLX's floating-point modes: mxfp4, nvfp4 and mxfp8."""

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ...models import global_scale
from ...models.float_formats import MODES
from ..bit_packing import pack_codes, unpack_codes
from ..float_grid import fit_float_groups
from ..packing import dequantize, pack
from .ste import POSITION_ERROR, StraightThroughQuantizer

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

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, scale_init: str):
        self._spec, self._dtype = spec, dtype
        self._mode = MODES[spec.mode]
        self._scale_init = scale_init
        self._scales: mx.array | None = None
        self._global_scale: mx.array | None = None

    def init(self, weight: mx.array) -> dict[str, mx.array]:
        """No quantization parameters; the scales of a weight [..., K] stay."""
        if self._scale_init == "minmax":
            return self.init_from_codes(pack(weight, self._spec, self._dtype))
        if self._spec.global_scale:
            self._global_scale = global_scale.largest_magnitude(weight)
            weight = global_scale.normalized(weight, self._global_scale)
        self._scales = self._fit(weight)
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

    def _fit(self, weight: mx.array) -> mx.array:
        """Codes of the scales with the least squared error, uint8 [..., G]."""
        rows = weight.reshape(-1, weight.shape[-1])
        size, costs = max(1, CHUNK_WEIGHTS // rows.shape[1]), mx.ones(rows.shape[1])
        codes = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size].astype(mx.float32)
            scales = fit_float_groups(part, costs, self._spec).scales
            codes.append(self._mode.scales.codes(scales).astype(mx.uint8))
            mx.eval(codes)
        return mx.concatenate(codes).reshape(*weight.shape[:-1], -1)

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
