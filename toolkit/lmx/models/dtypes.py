"""The type that a checkpoint stores, and the one to compute in."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from .. import cpu
from . import global_scale
from .float_formats import straight_through

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def compute_dtype(name: str, stored: mx.Dtype) -> mx.Dtype:
    """The type to compute in; see `load`."""
    if name in DTYPES:
        return DTYPES[name]
    return mx.float32 if name == "auto" and cpu.on_cpu() else stored


def stored_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type of most parameters (or their scales)."""
    sizes: dict[mx.Dtype, int] = {}
    for _, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.size
    return max(sizes, key=sizes.get)


def forward_weight(master: mx.array, stored: mx.Dtype, compute: mx.Dtype) -> mx.array:
    """A float32 weight in training, with the rounding of its checkpoint.

    The gradient is that of the weight without the rounding.
    """
    if stored not in (mx.float32, compute):
        master = straight_through(partial(mx.array.astype, dtype=stored))(master)
    return master.astype(compute)


def set_compute_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the floating parameters, except those that the model must keep as stored."""
    cast(model, dtype)
    mx.eval(model.parameters())


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """`set_compute_dtype` without evaluation."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast_one(path, value):
        is_float = mx.issubdtype(value.dtype, mx.floating)
        # MLX takes global scales in float32 only.
        is_kept = path.endswith(f".{global_scale.NAME}") or not may_cast(path)
        return value.astype(dtype) if is_float and not is_kept else value

    model.update(tree_map_with_path(cast_one, model.parameters()))
