"""Faster functions and layers in place of MLX's on the CPU.

Functions: MLX's exponentials are slow on the CPU, and so are the activations and the
attention made of them.

Quantized layers: on the CPU, `mx.quantized_matmul` costs the same for every input row,
and uses one core. Dequantizing the weight costs once, after which a row is nearly free
in the BLAS. For generation the weights can stay dequantized.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .attention import attention
from .fast_exp import gelu_approx, silu, swiglu

# Input rows from which dequantizing is faster, by bits or by mode. Measured on one core
# with OpenBLAS: the same for layers of 256 to 2048, but different for each packing of
# the codes.
MIN_ROWS_AFFINE = {2: 3, 3: 6, 4: 2, 5: 8, 6: 10, 8: 2}
MIN_ROWS_FLOATING = {"mxfp4": 24, "nvfp4": 24, "mxfp8": 2}
# Queries from which blockwise attention is faster, and values from which `swiglu` is.
MIN_QUERIES, MIN_GATE_VALUES = 64, 1 << 14
MLX_LM_MODELS = "mlx_lm.models."
# Share of the available memory that dequantized weights may take.
EXPANDED_SHARE = 0.25
MEMORY_FILE = Path("/proc/meminfo")

mlx_attention = mx.fast.scaled_dot_product_attention
"""MLX's own function, as it was before `replace_functions`."""


@cache
def replace_functions() -> None:
    """Replace MLX's silu, gelu and attention for all models of this process."""
    nn.silu, nn.gelu_approx = silu, gelu_approx
    mx.fast.scaled_dot_product_attention = _attention


def _attention(queries, keys, values, *, scale, mask=None, sinks=None, **options):
    """MLX's attention, blockwise for long float32 self-attention."""
    length = queries.shape[2]
    supported = sinks is None and (mask is None or isinstance(mask, str))
    if (
        supported
        and not options
        and MIN_QUERIES <= length == keys.shape[2]
        and queries.dtype == keys.dtype == values.dtype == mx.float32
    ):
        return attention(queries, keys, values, scale, causal=mask is not None)
    return mlx_attention(
        queries, keys, values, scale=scale, mask=mask, sinks=sinks, **options
    )


def replace_swiglu() -> None:
    """Replace mlx-lm's `swiglu` for all its models of this process.

    Modules that are loaded hold the function by name. Modules loaded later import the
    replaced one.
    """
    activations = sys.modules.get(f"{MLX_LM_MODELS}activations")
    original = getattr(activations, "swiglu", None)
    if original is None or original.__module__ == __name__:
        return

    def replacement(gate, x):
        return (swiglu if gate.size >= MIN_GATE_VALUES else original)(gate, x)

    for name, module in list(sys.modules.items()):
        if (
            name.startswith(MLX_LM_MODELS)
            and getattr(module, "swiglu", None) is original
        ):
            module.swiglu = replacement


def dequantize_for_many_tokens(model: nn.Module) -> None:
    """Let the quantized layers of `model` dequantize their weights for large inputs."""
    for _, module in model.named_modules():
        if type(module) is nn.QuantizedLinear:
            module.__class__ = DequantizingLinear
        elif type(module) is nn.QuantizedEmbedding:
            module.__class__ = DequantizingEmbedding


def keep_dequantized(model: Any) -> int:
    """Keep the weights of quantized layers dequantized, in float32, if memory allows.

    The layers then multiply few rows as fast as dense ones do. A layer whose codes or
    scales are replaced afterwards dequantizes them again for every call.

    Args:
        model: nothing is done for a function in place of a module.

    Returns:
        The bytes that they take; 0 if they would take more than a quarter of the
        available memory.
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else []
    layers = [
        module
        for _, module in modules
        if isinstance(module, DequantizingLinear | DequantizingEmbedding)
        and not _is_kept(module)
    ]
    size = sum(4 * m.weight.size * 32 // m.bits for m in layers)
    if not layers or size > EXPANDED_SHARE * available_memory():
        return 0
    for layer in layers:
        # Names with an underscore are not parameters.
        layer._dense = _dequantized(layer, mx.float32)
        layer._source = (layer.weight, layer.scales)
        mx.eval(layer._dense)
    return size


def available_memory() -> int:
    """Bytes that a process can get without swapping."""
    for line in MEMORY_FILE.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _is_worthwhile(layer: nn.Module, x: mx.array) -> bool:
    """Whether `x` has enough rows that dequantizing the weight is faster."""
    if _kept(layer, x) is not None:
        return True
    threshold = MIN_ROWS_FLOATING.get(layer.mode) or MIN_ROWS_AFFINE.get(layer.bits, 10)
    return x.size // x.shape[-1] >= threshold


def _kept(layer: nn.Module, x: mx.array) -> mx.array | None:
    """The weight that is kept dequantized, if there is one for this input."""
    return layer._dense if x.dtype == mx.float32 and _is_kept(layer) else None


def _is_kept(layer: nn.Module) -> bool:
    """Whether the dequantized weight belongs to the codes and scales of a layer."""
    codes, scales = layer.get("_source", (None, None))
    return codes is layer.weight and scales is layer.scales


def _multiply(layer: nn.Module, x: mx.array) -> mx.array:
    weight = _kept(layer, x)
    return x @ (_dequantized(layer, x.dtype) if weight is None else weight).T


def _dequantized(layer: nn.Module, dtype: mx.Dtype) -> mx.array:
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
        dtype=dtype,
    )


class DequantizingLinear(nn.QuantizedLinear):
    """`nn.QuantizedLinear` that dequantizes its weight for many rows."""

    def __call__(self, x: mx.array) -> mx.array:
        if not _is_worthwhile(self, x):
            return super().__call__(x)
        y = _multiply(self, x)
        return y + self.bias if "bias" in self else y


class DequantizingEmbedding(nn.QuantizedEmbedding):
    """`nn.QuantizedEmbedding` that, as a head, dequantizes its weight for many rows."""

    def as_linear(self, x: mx.array) -> mx.array:
        if not _is_worthwhile(self, x):
            return super().as_linear(x)
        return _multiply(self, x)
