"""Faster functions in place of MLX's on the CPU.

MLX's exponentials are slow on the CPU, and so are the activations and the attention
made of them.
"""

import sys
from functools import cache

import mlx.core as mx
import mlx.nn as nn

from .attention import attention, decoding_attention
from .fast_exp import gelu_approx, silu, swiglu

# Queries from which blockwise attention is faster, and values from which `swiglu` is.
MIN_QUERIES, MIN_GATE_VALUES = 64, 1 << 14
# Queries up to which one product for a group of heads is faster.
MAX_DECODED = 8
MLX_LM_MODELS = "mlx_lm.models."

mlx_attention = mx.fast.scaled_dot_product_attention
"""MLX's own function, as it was before `replace_functions`."""


@cache
def replace_functions() -> None:
    """Replace MLX's silu, gelu and attention for all models of this process."""
    nn.silu, nn.gelu_approx = silu, gelu_approx
    mx.fast.scaled_dot_product_attention = _attention


def _attention(queries, keys, values, *, scale, mask=None, sinks=None, **options):
    """MLX's attention: by blocks for long self-attention, by group for decoding."""
    is_plain = sinks is None and not options
    if is_plain and queries.dtype == keys.dtype == values.dtype == mx.float32:
        length = queries.shape[2]
        is_named = isinstance(mask, str)
        # A mask that all heads share, such as that of a packed sequence's documents.
        is_shared = (
            mask is None
            or is_named
            or (mask.dtype == mx.bool_ and mask.ndim == 4 and mask.shape[1] == 1)
        )
        if is_shared and MIN_QUERIES <= length == keys.shape[2]:
            return attention(queries, keys, values, scale, mask)
        is_decoded = length <= MAX_DECODED and not is_named
        if is_shared and is_decoded and keys.shape[1] < queries.shape[1]:
            return decoding_attention(queries, keys, values, scale, mask)
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
