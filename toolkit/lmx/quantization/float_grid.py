"""Weights on the grids of MLX's floating-point modes: elements and scales."""

from dataclasses import dataclass

import mlx.core as mx

from ..config.quant_spec import QuantSpec
from ..models.float_formats import MODES
from .affine_grid import Grid
from .backend import round_to_dtype
from .bit_packing import pack_codes, unpack_codes


@dataclass(frozen=True)
class FloatGrid(Grid):
    """Elements [N, K] and scales [N, G], float32, of representable values."""

    elements: mx.array
    scales: mx.array

    def weight(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dequantized weight [N, K], float32, computed in `dtype`."""
        elements = self.elements.reshape(*self.scales.shape, self.group)
        weight = round_to_dtype(elements * self.scales[..., None], dtype)
        return weight.reshape(self.elements.shape)

    def tensors(self, spec: QuantSpec) -> dict[str, mx.array]:
        """The stored tensors: packed codes, and uint8 scales."""
        mode = MODES[spec.mode]
        return {
            "weight": pack_codes(mode.elements.codes(self.elements), spec.bits),
            "scales": mode.scales.codes(self.scales).astype(mx.uint8),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, mx.array], spec: QuantSpec) -> "FloatGrid":
        """The grid of stored tensors."""
        mode = MODES[spec.mode]
        elements = mode.elements.values(unpack_codes(tensors["weight"], spec.bits))
        return cls(elements, mode.scales.values(tensors["scales"]))


def fit_float_groups(target: mx.array, costs: mx.array, spec: QuantSpec) -> FloatGrid:
    """Choose the scale of every group on its own, with nearest elements.

    Args:
        costs: float32 [K], of a squared error in each column.
    """
    mode, number = MODES[spec.mode], MODES[spec.mode].elements
    groups = target.reshape(len(target), -1, spec.group_size)
    costs = costs.reshape(-1, spec.group_size)
    codes = mode.range_codes(mx.abs(groups).max(axis=-1).reshape(-1))
    best = None
    for candidate in mode.candidates(codes, mode.scales.SEARCH):
        scales = candidate.reshape(groups.shape[:2])
        elements = number.nearest(groups / scales[..., None], number.max)
        misses = elements * scales[..., None] - groups
        errors = (costs * misses * misses).sum(axis=-1)
        if best is None:
            best = errors, elements, scales
        else:
            is_better = errors < best[0]
            elements = mx.where(is_better[..., None], elements, best[1])
            scales = mx.where(is_better, scales, best[2])
            best = mx.minimum(errors, best[0]), elements, scales
        mx.eval(best)
    return FloatGrid(best[1].reshape(target.shape), best[2])
