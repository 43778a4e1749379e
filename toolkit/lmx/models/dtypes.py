"""The types that parameters are stored and computed in."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path


def stored_dtype(model: nn.Module) -> mx.Dtype:
    """The floating type that most of the parameters (or their scales) have."""
    sizes: dict[mx.Dtype, int] = {}
    for _, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.size
    return max(sizes, key=sizes.get)


def set_compute_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast the floating parameters but those the model says must keep their type."""
    cast(model, dtype)
    mx.eval(model.parameters())


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """The same, not yet computed."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def one(path, value):
        is_float = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if is_float and may_cast(path) else value

    model.update(tree_map_with_path(one, model.parameters()))
