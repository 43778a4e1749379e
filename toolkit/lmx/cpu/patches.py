"""Faster functions in place of MLX's on the CPU.

MLX's exponentials are slow on the CPU, and so are the activations and the attention
made of them.
"""

import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .attention import attention
from .fast_exp import gelu_approx, silu, swiglu

# Queries from which blockwise attention is faster, and values from which `swiglu` is.
MIN_QUERIES, MIN_GATE_VALUES = 64, 1 << 14
MLX_LM_MODELS = "mlx_lm.models."

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
