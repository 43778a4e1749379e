"""A draft model cut from a larger model: some of its blocks, in their order."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..generation.kv_cache.sequence import CacheState
from ..models.hooks import find_blocks
from ..models.loader import make_cache


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


def rank_layers(model: Any, tokens: mx.array) -> list[int]:
    """Layer indices, ordered by how little skipping them changes the predictions.

    Args:
        tokens: int32 [1, L].

    Raises:
        UserError: the model does not run with fewer layers.
    """
    blocks, target = find_blocks(model), _probabilities(model, tokens)
    rates = {}
    for layer in range(len(blocks.trunk[blocks.name])):
        # The acceptance rate: the mean of sum min(p, q) over all positions.
        draft = _probabilities(skip_layers(model, [layer]), tokens)
        rates[layer] = mx.minimum(target, draft).sum(axis=-1).mean().item()
    return sorted(rates, key=rates.get, reverse=True)


def _probabilities(model: Any, tokens: mx.array) -> mx.array:
    return mx.softmax(model(tokens).astype(mx.float32), axis=-1)


def skip_layers(model: Any, skipped: Sequence[int]) -> Any:
    """A model with fewer layers that shares all weights with this one.

    Raises:
        UserError: the model does not run with fewer layers.
    """
    blocks = find_blocks(model)
    draft = trunk = copy.copy(model)
    for name in blocks.path.split(".") if blocks.path else []:
        trunk[name] = copy.copy(trunk[name])
        trunk = trunk[name]
    trunk[blocks.name] = _without(trunk[blocks.name], skipped)
    # Some models make as many caches as their configuration has layers.
    draft.make_cache = lambda: _without(make_cache(model), skipped)
    try:
        CacheState(draft).forward(mx.zeros((1, 1), mx.int32))
    except (IndexError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"this model does not run with fewer layers: {error}",
            hint="use another architecture of draft model",
        ) from error
    return draft


def _without(items: list, skipped: Sequence[int]) -> list:
    return [item for index, item in enumerate(items) if index not in skipped]
