"""A draft model cut from a larger model: some of its blocks, in their order."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..models.hooks import find_blocks


def pruned_config(config: dict, layers: Sequence[int]) -> dict:
    """The config of a model of these blocks alone.

    Args:
        layers: indices of the blocks to keep, ascending.

    Raises:
        UserError: the model has no such block, or the config no number of blocks.
    """
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        raise UserError("cannot prune: this model's config has no num_hidden_layers")
    if layers[-1] >= count:
        raise UserError(
            f"there is no block {layers[-1]}: the model has blocks 0 to {count - 1}"
        )
    # Lists with one item per block are reduced to the kept blocks.
    lists = {
        key: [value[layer] for layer in layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count and key != "eos_token_id"
    }
    return config | lists | {"num_hidden_layers": len(layers)}


def prune(
    model: nn.Module, weights: dict[str, mx.array], layers: Sequence[int]
) -> dict[str, mx.array]:
    """The weights of the pruned model, by name.

    Args:
        weights: of `model`.
        layers: as for `pruned_config`.
    """
    prefix = find_blocks(model).prefix
    pruned = {}
    for name, weight in weights.items():
        if not name.startswith(prefix):
            pruned[name] = weight
            continue
        index, _, parameter = name.removeprefix(prefix).partition(".")
        if int(index) in layers:
            pruned[f"{prefix}{layers.index(int(index))}.{parameter}"] = weight
    return pruned


def most_important_blocks(order: Sequence[int], count: int) -> tuple[int, ...]:
    """The blocks to keep, of blocks in ascending order of importance."""
    return tuple(sorted(order[len(order) - count :]))
