"""Experts in mode nvfp4 with a `global_scale`, one float32 number per expert.

mlx-lm's `QuantizedSwitchLinear` has it, its linear layers do not. It is the largest
magnitude of the expert. A weight is element * (E4M3 scale * (global_scale / 2688)), in
float32: 2688 is the product of the largest element and the largest E4M3 scale, so that
the largest group of every expert has the largest scale. Without it, groups of weights
below .1 have scales in the coarse subnormal range of E4M3.

MLX multiplies with it on GPUs only (`mx.gather_qmm`). On a CPU the experts are
dequantized for their product.
"""

from functools import cache

import mlx.core as mx
import mlx.nn as nn

from ..config.quant_spec import FLOAT_MODES
from ..cpu import on_cpu
from ..cpu.quantized_matmul import kept_weight
from .float_formats import MODES, E4M3Scales
from .hooks import put_in_front

MODE, NAME = "nvfp4", "global_scale"
GRID = dict(zip(("group_size", "bits"), FLOAT_MODES[MODE], strict=True)) | {
    "mode": MODE
}
# The code of the E4M3 scale 1.
ONE = 0x38
LARGEST = MODES[MODE].elements.max * 448.0


def quantize(weight: mx.array) -> dict[str, mx.array]:
    """Packed codes, scales and global scales of experts [..., N, K], by RTN.

    The same bits as mlx-lm's `quantize_model(global_scale=True)`.
    """
    experts = weight.reshape(-1, *weight.shape[-2:])
    global_scale = largest_magnitude(experts)
    parts = [
        mx.quantize(expert, global_scale=scale, **GRID)
        for expert, scale in zip(experts, global_scale, strict=True)
    ]
    codes, scales = (mx.stack(values) for values in zip(*parts, strict=True))
    leading = weight.shape[:-2]
    return {
        "weight": codes.reshape(*leading, *codes.shape[1:]),
        "scales": scales.reshape(*leading, *scales.shape[1:]),
        NAME: global_scale.reshape(leading),
    }


def largest_magnitude(weight: mx.array) -> mx.array:
    """The global scales [...] of weights [..., N, K], float32."""
    return mx.abs(weight).max(axis=(-2, -1)).astype(mx.float32)


def group_scales(scales: mx.array, global_scale: mx.array) -> mx.array:
    """What elements are multiplied by, float32 [..., N, G].

    Args:
        scales: E4M3 codes [..., N, G].
        global_scale: float32 [...].
    """
    return E4M3Scales.values(scales) * scale_unit(global_scale)


def scale_unit(global_scale: mx.array) -> mx.array:
    """What an element of 1 with an E4M3 scale of 1 stands for, float32 [..., 1, 1]."""
    return global_scale.astype(mx.float32)[..., None, None] / LARGEST


def normalized(weight: mx.array, global_scale: mx.array) -> mx.array:
    """Weights [..., N, K] that the codes without a global scale stand for, float32."""
    unit = scale_unit(global_scale)
    # An expert of zeros has the global scale zero.
    return weight.astype(mx.float32) / mx.where(unit == 0, 1.0, unit)


def dequantize(codes: mx.array, scales: mx.array, global_scale: mx.array) -> mx.array:
    """The float32 weight [..., N, K], bit for bit that of `mx.dequantize`, which has
    one global scale."""
    ones = mx.full(scales.shape, ONE, mx.uint8)
    elements = mx.dequantize(codes, ones, dtype=mx.float32, **GRID)
    factors = group_scales(scales, global_scale)[..., None]
    return (elements.reshape(*scales.shape, -1) * factors).reshape(elements.shape)


def support_cpus(model: nn.Module) -> None:
    """Let the experts of `model` that have a global scale compute on CPUs, too."""
    for _, module in model.named_modules():
        is_expert_layer = type(module).__name__ == "QuantizedSwitchLinear"
        if is_expert_layer and NAME in module:
            put_in_front(GlobalScaleExperts, module)


class GlobalScaleExperts:
    """A class in front of mlx-lm's, whose product is that of float32 weights on a CPU.

    Fewer products than experts, as in generation: the experts of each are dequantized.
    More: all are, once. A gradient dequantizes them again, so that training keeps the
    memory of the codes. `cpu.keep_dequantized` keeps float32 weights.
    """

    def __call__(
        self, x: mx.array, indices: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        if not on_cpu():
            return super().__call__(x, indices, sorted_indices=sorted_indices)
        weight = kept_weight(self)
        if weight is not None:
            y = _multiply(x, weight, indices, sorted_indices)
        else:
            codes = self.weight, self.scales, self.global_scale
            if indices.size < len(self.weight):
                codes = tuple(values[indices.flatten()] for values in codes)
                chosen = mx.arange(indices.size).reshape(indices.shape)
            else:
                chosen = indices
            y = _dequantizing_product(sorted_indices)(x, *codes, chosen)
        if "bias" in self:
            y = y + mx.expand_dims(self.bias[indices], -2)
        return y

    def dequantized(self) -> mx.array:
        """The weight [experts, N, K], float32."""
        return dequantize(self.weight, self.scales, self.global_scale)


def _multiply(x, weight, indices, sorted_indices: bool) -> mx.array:
    # MLX's CPU backend gathers products of float32 alone.
    y = mx.gather_mm(
        x.astype(mx.float32),
        weight.swapaxes(-1, -2),
        rhs_indices=indices,
        sorted_indices=sorted_indices,
    )
    return y.astype(x.dtype)


@cache
def _dequantizing_product(sorted_indices: bool):
    """A function x, codes, scales, global_scale, indices -> y that keeps no weight for
    its gradient, as in `cpu.quantized_matmul`."""

    @mx.custom_function
    def multiply(x, codes, scales, global_scale, indices):
        weight = dequantize(codes, scales, global_scale)
        return _multiply(x, weight, indices, sorted_indices)

    @multiply.vjp
    def _(primals, cotangent, _):
        x, codes, *others = primals
        # Else compilation would merge both dequantized weights into one that stays.
        [codes_again] = mx.depends([codes], [cotangent])
        scales, global_scale, indices = others
        weight = dequantize(codes_again, scales, global_scale)
        _, [gradient] = mx.vjp(
            lambda x: _multiply(x, weight, indices, sorted_indices), [x], [cotangent]
        )
        return gradient, *map(mx.zeros_like, (codes, *others))

    return multiply
