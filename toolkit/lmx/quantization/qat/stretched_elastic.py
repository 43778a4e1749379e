"""Levels around zero, one learned number per group: stretched elastic quantization."""

from functools import partial
from typing import ClassVar

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ..affine_grid import ROUNDS, SHRINKS
from .affine import AffineSTE
from .ste import straight_through

FRACTION_BITS = {mx.float32: 23, mx.float16: 10, mx.bfloat16: 7}


class StretchedElasticQuantizer:
    """Levels scale * (code - MIDDLE), for codes 0 ... 2 MIDDLE (arXiv 2502.02631).

    Every level has a cell of one step, the outermost too: a weight further out has no
    gradient. The clip alpha of the paper is where they end, MIDDLE + 1/2 steps from 0.

    Attributes:
        MIDDLE: half the number of the last code.
        SPARE: bits of a scale's fraction that stay zero, so that the checkpoint's type
            holds every level as it is.
    """

    IS_STRAIGHT: ClassVar = False
    MIDDLE: ClassVar[float]
    SPARE: ClassVar[int]

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        top = round(2 * self.MIDDLE)
        self._affine = AffineSTE(spec, dtype, top=top, margin=0.5)
        self._start = start
        kept = FRACTION_BITS[dtype] - self.SPARE
        self._storable = straight_through(partial(_shortened, bits=kept))

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """The first scales: outermost cells end at the largest weights, or fitted."""
        group_size = self._affine.spec.group_size
        groups = weight.astype(mx.float32).reshape(-1, group_size)
        scales = mx.abs(groups).max(axis=-1) / (self.MIDDLE + 0.5)
        return {
            "scales": scales if self._start == "minmax" else self._fit(groups, scales)
        }

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32; see `Affine.rounded`."""
        return self._affine.rounded(weight, *self._pair(learned))

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return self._affine.packed(weight, *self._pair(learned))

    def _pair(self, learned: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        scales = self._storable(learned["scales"])
        return scales, -self.MIDDLE * scales

    def _fit(self, groups: mx.array, widest: mx.array) -> mx.array:
        """The best of many shares of the range, improved by least squares."""
        found = [widest, *(shrink * widest for shrink in SHRINKS)]
        best = found[0]
        for tried in found[1:]:
            best = self._better(groups, best, tried)
        for _ in range(ROUNDS):
            levels = self._levels(groups, best)
            power = (levels * levels).sum(axis=-1)
            fitted = (groups * levels).sum(axis=-1) / mx.where(power == 0, 1.0, power)
            best = self._better(groups, best, mx.where(power == 0, best, fitted))
        return best

    def _better(self, groups, scales, others) -> mx.array:
        errors = [
            mx.square(self._levels(groups, s) * s[:, None] - groups).sum(axis=-1)
            for s in (scales, others)
        ]
        return mx.where(errors[1] < errors[0], others, scales)

    def _levels(self, groups: mx.array, scales: mx.array) -> mx.array:
        inverse = mx.where(scales == 0, 0.0, 1 / scales)[:, None]
        codes = mx.round(groups * inverse + self.MIDDLE)
        return mx.clip(codes, 0, 2 * self.MIDDLE) - self.MIDDLE


def _shortened(values: mx.array, bits: int) -> mx.array:
    """The nearest float32 with `bits` bits of fraction."""
    dropped = 23 - bits
    if not dropped:
        return values
    whole = values.astype(mx.float32).view(mx.uint32) + (1 << (dropped - 1))
    return ((whole >> dropped) << dropped).view(mx.float32)


# --- from model.grids.balanced: 2 bits without a zero: -3/4, -1/4, 1/4 and 3/4 of a learned alpha.


class SEQQuantizer(StretchedElasticQuantizer):
    """Alpha is two steps; the last code's 3 scale takes two bits more than a scale."""

    MIDDLE, SPARE = 1.5, 2


# --- from model.grids.ternary: Three levels, -1, 0 and 1 of a learned number, in 2 bits: the last code is unused.


class TernaryQuantizer(StretchedElasticQuantizer):
    """All levels are the scale itself, or twice it less it."""

    MIDDLE, SPARE = 1.0, 0
