"""Quantized layers that are faster on a Linux CPU.

There, `mx.quantized_matmul` costs the same for every input row, and uses one core.
Few rows: the weight's rows are shared among the cores. Many rows: the weight is
dequantized once, after which a row is nearly free in the BLAS. For generation the
weights can stay dequantized. In training they do not: the backward pass dequantizes
them again, which takes less than a tenth of the time of the products with 512 rows, and
keeps the memory of the codes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients

from . import blas
from .memory import available_memory

# Input rows from which dequantizing is faster, by bits or by mode. Measured on one core
# with OpenBLAS: the same for layers of 256 to 2048, but different for each packing of
# the codes.
MIN_ROWS_AFFINE = {2: 3, 3: 6, 4: 2, 5: 8, 6: 10, 8: 2}
MIN_ROWS_FLOATING = {"mxfp4": 24, "nvfp4": 24, "mxfp8": 2}
# Weights per core from which another core is faster: it costs 40 us to wait for it, in
# which one core multiplies 40,000 weights.
MIN_WEIGHTS_PER_CORE = 1 << 18
# Share of the available memory that dequantized weights may take.
EXPANDED_SHARE = 0.25


def use_fast_layers(model: nn.Module) -> None:
    """Let the quantized layers of `model` use all cores, for few rows and for many."""
    for _, module in model.named_modules():
        if fast := FAST_LAYERS.get(type(module)):
            module.__class__ = fast


def keep_dequantized(model: Any) -> int:
    """Keep the weights of quantized layers dequantized, in float32, if memory allows.

    The layers then multiply few rows as fast as dense ones do. A layer whose codes or
    scales are replaced afterwards dequantizes them again for every call.

    Args:
        model: nothing is done for a function in place of a module. A module with a
            method `dequantized` gives its weight itself.

    Returns:
        The bytes that they take; 0 if they would take more than a quarter of the
        available memory.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else []
    layers = [
        module
        for _, module in modules
        if (isinstance(module, KEPT_LAYERS) or hasattr(module, "dequantized"))
        and kept_weight(module) is None
    ]
    size = sum(4 * m.weight.size * 32 // m.bits for m in layers)
    if not layers or size > EXPANDED_SHARE * available_memory():
        return 0
    for layer in layers:
        # Names with an underscore are not parameters.
        layer._dense = _dequantized(layer)
        layer._source = (layer.weight, layer.scales)
        mx.eval(layer._dense)
    return size


def multiply(layer: nn.Module, x: mx.array) -> mx.array:
    """x @ W.T of a quantized layer, in the way that is fastest for the rows of `x`."""
    weight = kept_weight(layer)
    if weight is not None and x.dtype == weight.dtype:
        return x @ weight.T
    cores = _core_count(layer)
    threshold = MIN_ROWS_FLOATING.get(layer.mode) or MIN_ROWS_AFFINE.get(layer.bits, 10)
    if x.size // x.shape[-1] < cores * threshold:
        return _quantized_matmul(layer, x, cores)
    multiply = _dequantizing_product(layer.group_size, layer.bits, layer.mode)
    biases = [layer.biases] if "biases" in layer else []
    return multiply(x, layer.weight, layer.scales, *biases)


@cache
def _dequantizing_product(group_size: int, bits: int, mode: str) -> Callable:
    """A function x, codes, scales[, biases] -> x @ W.T that keeps no W for its vjp."""

    def product(x, codes, scales, biases=None):
        weight = mx.dequantize(
            codes, scales, biases, group_size, bits, mode, dtype=x.dtype
        )
        return x @ weight.T

    multiply = mx.custom_function(product)

    @multiply.vjp
    def multiply_vjp(primals, cotangent, _):
        x, codes, *grid = primals
        # Else compilation would merge both dequantized weights into one that stays.
        [codes_again] = mx.depends([codes], [cotangent])
        # The scales of the floating-point modes are codes, too.
        floats = [x, *grid] if mode == "affine" else [x]
        others = [] if mode == "affine" else grid
        _, gradients = mx.vjp(
            lambda x, *grid: product(x, codes_again, *grid, *others),
            floats,
            [cotangent],
        )
        return (
            gradients[0],
            mx.zeros_like(codes),
            *gradients[1:],
            *map(mx.zeros_like, others),
        )

    return multiply


def _core_count(layer: nn.Module) -> int:
    """Cores that share the rows of a layer's weight."""
    weights = layer.weight.size * 32 // layer.bits
    cores = blas.use_openblas().threads or 1
    return max(1, min(cores, weights // MIN_WEIGHTS_PER_CORE, layer.weight.shape[0]))


def _quantized_matmul(layer: nn.Module, x: mx.array, cores: int) -> mx.array:
    """`mx.quantized_matmul` with a part of the weight's rows on each of `cores`."""
    tensors = [layer.weight, layer.scales, layer.get("biases")]
    grid = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    if cores == 1:
        return mx.quantized_matmul(x, *tensors, **grid)
    rows = layer.weight.shape[0]
    outputs = []
    for core in range(cores):
        part = slice(rows * core // cores, rows * (core + 1) // cores)
        parts = [None if tensor is None else tensor[part] for tensor in tensors]
        outputs.append(mx.quantized_matmul(x, *parts, **grid, stream=_stream(core)))
    return mx.concatenate(outputs, axis=-1)


@cache
def _stream(core: int) -> mx.ThreadLocalStream | None:
    """A CPU stream, which computes in its own thread; None = the default stream."""
    return mx.new_thread_local_stream(mx.cpu) if core else None


def kept_weight(layer: nn.Module) -> mx.array | None:
    """The weight that `keep_dequantized` keeps for the present codes and scales."""
    codes, scales = layer.get("_source", (None, None))
    is_current = codes is not None and codes is layer.weight and scales is layer.scales
    return layer._dense if is_current else None


def _dequantized(layer: nn.Module) -> mx.array:
    # A layer with a grid of its own.
    if hasattr(layer, "dequantized"):
        return layer.dequantized()
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        dtype=mx.float32,
    )


class FastQuantizedLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` that uses all cores."""

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(self, x)
        return y + self.bias if "bias" in self else y


class FastQuantizedEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` that, as a head, uses all cores."""

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(self, x)


class FastAllToShardedLinear(nn.QuantizedAllToShardedLinear):
    """`nn.QuantizedAllToShardedLinear` that uses all cores."""

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(self, sum_gradients(self.group)(x))
        return y + self.bias if "bias" in self else y


class FastShardedToAllLinear(nn.QuantizedShardedToAllLinear):
    """`nn.QuantizedShardedToAllLinear` that uses all cores."""

    def __call__(self, x: mx.array) -> mx.array:
        y = mx.distributed.all_sum(multiply(self, x), group=self.group)
        return y + self.bias if "bias" in self else y


FAST_LAYERS = {
    nn.QuantizedLinear: FastQuantizedLinear,
    nn.QuantizedEmbedding: FastQuantizedEmbedding,
    nn.QuantizedAllToShardedLinear: FastAllToShardedLinear,
    nn.QuantizedShardedToAllLinear: FastShardedToAllLinear,
}
KEPT_LAYERS = (*FAST_LAYERS.values(), nn.QQLinear)
