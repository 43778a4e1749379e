"""Attention over rows of very different lengths, without padding to the longest.

The rows of a batch are in length classes, and those of a class share their buffers. All
other layers of a model compute all rows together.
"""

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

MAX_WASTE = 0.1
"""Largest share of the positions of a class that its shorter rows leave empty."""
FREE_POSITIONS = 128
"""Positions of a row that may be empty: another class costs more time than they do."""
MLX_LM_MODELS = "mlx_lm.models."


class ByClass(tuple):
    """Keys, values or masks of every length class, in place of one array."""


def by_class(parts: Sequence) -> Any:
    """What a model gets: one part as it is, several as one object."""
    return parts[0] if len(parts) == 1 else ByClass(parts)


def class_for(
    length: int, classes: Sequence[Sequence[int]], free_positions: int
) -> int:
    """The class that a row joins without much waste; that after the last = a new one.

    Args:
        classes: the lengths of the rows of every class.
        free_positions: every row counts as longer by these.
    """
    wastes = []
    for index, lengths in enumerate(classes):
        counted = [n + free_positions for n in (length, *lengths)]
        waste = 1 - sum(counted) / max(1, len(counted) * max(counted))
        wastes.append((waste, index))
    waste, index = min(wastes, default=(1.0, 0))
    return index if waste <= MAX_WASTE else len(classes)


def replace_attention() -> None:
    """Let all loaded models of mlx-lm take keys, values and masks by class.

    A cache can also observe the queries; see `eviction.ObservedQueries`.
    """
    base = sys.modules.get(f"{MLX_LM_MODELS}base")
    original = getattr(base, "scaled_dot_product_attention", None)
    if original is None or original.__module__ == __name__:
        return

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        **options: Any,
    ) -> mx.array:
        options |= {"cache": cache, "scale": scale}
        if observed := getattr(cache, "observed", None):
            observed.add(queries, mask, scale, cache.offset)
        if not isinstance(keys, ByClass):
            return original(queries, keys, values, mask=mask, **options)
        outputs, start = [], 0
        for index, (k, v) in enumerate(zip(keys, values, strict=True)):
            end = start + (k if isinstance(k, mx.array) else k[0]).shape[0]
            mine = mask[index] if isinstance(mask, ByClass) else mask
            rows = queries[start:end]
            outputs.append(original(rows, k, v, mask=mine, **options))
            start = end
        return mx.concatenate(outputs)

    for name, module in [*sys.modules.items()]:
        if name.startswith(MLX_LM_MODELS) and (
            getattr(module, original.__name__, None) is original
        ):
            module.scaled_dot_product_attention = scaled_dot_product_attention
