"""Scales and biases that are trained with the weights: LSQ with an offset."""

from typing import ClassVar

import mlx.core as mx

from ...config.quant_spec import QuantSpec
from ..packing import expand, pack
from .affine import AffineSTE, numbers
from .ste import straight_through
from .stretched_elastic import SEQQuantizer, TernaryQuantizer


class LSQQuantizer:
    """A scale and a bias of every group, as masters in float32."""

    IS_STRAIGHT: ClassVar = False
    MARGIN: ClassVar = 0.0

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        top = 2**spec.bits - 1
        self._affine = AffineSTE(spec, dtype, top=top, margin=self.MARGIN)
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


# --- from model.grids.kept: A grid that stays, whose codes are trained: above all that of a quantized model.


class FixedScaleQuantizer(LSQQuantizer):
    """Scales and biases of the beginning; weights move between the points they make.

    The outermost points have a cell of one step, as the others have: a weight that is
    on one moves on from there.
    """

    MARGIN: ClassVar = 0.5

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """Learns nothing; the grid of a weight is kept."""
        self._kept = super().begin(weight)
        mx.eval(self._kept)
        return {}

    def resume(self, packed: dict[str, mx.array]) -> dict[str, mx.array]:
        """Learns nothing; the grid that a checkpoint stores is kept."""
        self._kept = super().resume(packed)
        return {}

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32; see `Affine.rounded`."""
        return super().rounded(weight, self._kept)

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return super().packed(weight, self._kept)


# --- from model.grids.frozen: Codes that stay, with scales and biases that are trained (arXiv 2407.11062).


class ScalesOnlyQuantizer(LSQQuantizer):
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


# --- from model.grids.minmax: MLX's own grid, made anew of the weights in every step.


class MinMaxQuantizer:
    """Rounds as `mx.quantize` does, in every mode; has nothing to learn.

    Attributes:
        IS_STRAIGHT: whether the slope of the rounded weight is that of the weight, all
            over, so that whoever knows the one need not ask the grid.
    """

    IS_STRAIGHT: ClassVar = True

    def __init__(self, spec: QuantSpec, dtype: mx.Dtype, start: str):
        self._spec, self._dtype = spec, dtype

    def begin(self, weight: mx.array) -> dict[str, mx.array]:
        """The learned parameters: none."""
        return {}

    def rounded(self, weight: mx.array, learned: dict[str, mx.array]) -> mx.array:
        """The weight [..., K] as served, float32, straight through."""
        return straight_through(
            lambda w: expand(self.packed(w, learned), self._spec, self._dtype)
        )(weight)

    def packed(
        self, weight: mx.array, learned: dict[str, mx.array]
    ) -> dict[str, mx.array]:
        """What a checkpoint stores of it."""
        return pack(weight, self._spec, self._dtype)


QUANTIZERS = {
    "minmax": MinMaxQuantizer,
    "lsq": LSQQuantizer,
    "scales_only": ScalesOnlyQuantizer,
    "fixed_scale": FixedScaleQuantizer,
    "seq": SEQQuantizer,
    "ternary": TernaryQuantizer,
}
