"""What adapters ask of the layer they wrap, be it dense or quantized."""

import math

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError


def is_quantized(layer: nn.Module) -> bool:
    """Whether the layer stores codes and scales."""
    return "scales" in layer and hasattr(layer, "group_size")


def is_affine_quantized(layer: nn.Module) -> bool:
    """Whether the layer stores codes on an affine grid."""
    return is_quantized(layer) and layer.mode == "affine"


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape [..., out, in] of a layer's weight.

    From the scales: at 3, 5 and 6 bits a packed width does not tell it by a division.
    """
    if not is_quantized(layer):
        return tuple(layer.weight.shape)
    *rows, groups = layer.scales.shape
    return (*rows, groups * layer.group_size)


def dequantize(layer: nn.Module, tensors: dict[str, mx.array]) -> mx.array:
    """The float32 weight [..., out, in] of a layer, from its tensors by name.

    Raises:
        UserError: nvfp4 with a second scale for the whole tensor.
    """
    if not is_quantized(layer):
        return tensors["weight"].astype(mx.float32)
    if tensors.get("global_scale") is not None:
        raise UserError("nvfp4 with a global scale cannot carry an adapter yet")
    return mx.dequantize(
        tensors["weight"],
        _exact(tensors["scales"]),
        _exact(tensors.get("biases")),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )


def dequantized_weight(layer: nn.Module) -> mx.array:
    """`expand` of the layer's own tensors."""
    return dequantize(layer, dict(layer.items()))


def init_lora_a(
    rows: int, columns: int, key: mx.array, *, before: tuple[int, ...] = ()
) -> mx.array:
    """The first A of a layer with `rows` inputs, uniform as in mlx-lm."""
    bound = 1 / math.sqrt(rows)
    return mx.random.uniform(-bound, bound, (*before, rows, columns), key=key)


def row_norms(
    squares: mx.array,
    product: mx.array,
    left: mx.array,
    right: mx.array,
    scale: float,
) -> mx.array:
    """Norms of the rows of W + scale * left right, detached, without that sum.

    Args:
        squares: squared norms of the rows of W [rows, columns].
        product: right W^T, [rank, rows].
        left: [rows, rank].
        right: [rank, columns].
    """
    product, left, right = (v.astype(mx.float32) for v in (product, left, right))
    crossed = (left * product.T).sum(axis=1)
    update = ((left @ (right @ right.T)) * left).sum(axis=1)
    total = squares + 2 * scale * crossed + scale**2 * update
    return mx.stop_gradient(mx.sqrt(total))


def rescale_rows(weight: mx.array, magnitude: mx.array) -> mx.array:
    """A weight whose rows get these norms."""
    norms = mx.sqrt(weight.square().sum(axis=1))
    return (magnitude / norms)[:, None] * weight


def _exact(values: mx.array | None) -> mx.array | None:
    """Scales in float32; those of the floating-point modes are codes themselves."""
    if values is None or not mx.issubdtype(values.dtype, mx.floating):
        return values
    return values.astype(mx.float32)
