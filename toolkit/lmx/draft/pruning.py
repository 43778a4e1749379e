"""Structured pruning: a draft model cut from a larger model in depth and width."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..models.hooks import find_blocks, hook_calls

# Linear layers of a block that read from, or write to, the residual stream.
READS_RESIDUAL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WRITES_RESIDUAL = ("o_proj", "down_proj")
# Norms over a head. Their width is the head dimension, not the hidden size.
HEAD_NORMS = ("q_norm", "k_norm")
INPUT_NORM, DOWN_PROJ = "input_layernorm", "mlp.down_proj"


@dataclass(frozen=True)
class ChannelImportance:
    """Mean magnitudes of activations, as in Minitron (arXiv 2407.14679).

    Attributes:
        hidden: of the residual stream [hidden_size], over all blocks.
        intermediate: of the MLP [intermediate_size], per block.
    """

    hidden: mx.array
    intermediate: list[mx.array]


@dataclass(frozen=True)
class PrunedShape:
    """The shape of a pruned model.

    Attributes:
        layers: indices of the blocks to keep, ascending.
        hidden_size, intermediate_size: None = unchanged.
    """

    layers: tuple[int, ...]
    hidden_size: int | None = None
    intermediate_size: int | None = None

    @property
    def is_narrower(self) -> bool:
        """Whether channels are removed, which needs their importance."""
        return bool(self.hidden_size or self.intermediate_size)


def pruned_config(config: dict, shape: PrunedShape) -> dict:
    """The config of a model pruned to this shape.

    Raises:
        UserError: the shape is larger than the model, or the config lacks a size.
    """
    sizes = {"num_hidden_layers": len(shape.layers)}
    for name in ("hidden_size", "intermediate_size"):
        sizes[name] = getattr(shape, name) or config.get(name)
    for name, size in sizes.items():
        if not isinstance(config.get(name), int) or size is None:
            raise UserError(f"cannot prune: this model's config has no {name}")
        if size > config[name]:
            raise UserError(f"cannot prune {name} from {config[name]} to {size}")
    count = config["num_hidden_layers"]
    if shape.layers[-1] >= count:
        raise UserError(
            f"there is no block {shape.layers[-1]}: the model has blocks 0 to "
            f"{count - 1}"
        )
    # Lists with one item per block are reduced to the kept blocks.
    lists = {
        key: [value[layer] for layer in shape.layers]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count and key != "eos_token_id"
    }
    heads = config.get("num_attention_heads")
    if shape.hidden_size and heads and not config.get("head_dim"):
        sizes["head_dim"] = config["hidden_size"] // heads
    return config | lists | sizes


def prune(
    model: nn.Module,
    weights: dict[str, mx.array],
    shape: PrunedShape,
    importance: ChannelImportance | None,
) -> dict[str, mx.array]:
    """The weights of the pruned model, by name.

    Args:
        weights: of `model`, not quantized.
        importance: of the channels; needed if the shape is narrower.
    """
    prefix = find_blocks(model).prefix
    pruned = {}
    for name, weight in weights.items():
        if not name.startswith(prefix):
            pruned[name] = weight
            continue
        index, _, parameter = name.removeprefix(prefix).partition(".")
        layer = int(index)
        if layer in shape.layers:
            if shape.intermediate_size:
                channels = most_important(
                    importance.intermediate[layer], shape.intermediate_size
                )
                weight = _prune_intermediate(parameter, weight, channels)
            pruned[f"{prefix}{shape.layers.index(layer)}.{parameter}"] = weight
    if shape.hidden_size:
        channels = most_important(importance.hidden, shape.hidden_size)
        width = importance.hidden.size
        pruned = {
            name: _prune_hidden(name, weight, channels, width)
            for name, weight in pruned.items()
        }
    return pruned


def most_important_blocks(order: Sequence[int], count: int) -> tuple[int, ...]:
    """The blocks to keep, of blocks in ascending order of importance."""
    return tuple(sorted(order[len(order) - count :]))


def most_important(importance: mx.array, count: int) -> mx.array:
    """Indices of the most important channels, ascending."""
    return mx.sort(mx.argsort(-importance)[:count])


def _prune_intermediate(name: str, weight: mx.array, channels: mx.array) -> mx.array:
    if "gate_proj" in name or "up_proj" in name:
        return weight[channels]
    return weight[:, channels] if name.endswith("down_proj.weight") else weight


def _prune_hidden(
    name: str, weight: mx.array, channels: mx.array, width: int
) -> mx.array:
    """A weight without the removed channels of the residual stream."""
    path, _, parameter = name.rpartition(".")
    layer = path.rpartition(".")[2]
    if layer in HEAD_NORMS or (layer in READS_RESIDUAL and parameter == "bias"):
        return weight
    if layer in WRITES_RESIDUAL:
        return weight[channels]
    if weight.shape[-1] == width:
        return weight[..., channels]
    raise UserError(
        f"cannot prune the hidden size of {name}",
        hint="remove hidden_size; prune num_layers or intermediate_size",
    )


def channel_importance(model: nn.Module, tokens: mx.array) -> ChannelImportance:
    """Measure the activations of the model on tokens [1, L].

    Raises:
        UserError: the blocks have no input_layernorm or no MLP with a down_proj.
    """
    blocks = find_blocks(model)
    layers = blocks.trunk[blocks.name] if blocks else []
    if not layers or not all(
        INPUT_NORM in layer and "down_proj" in getattr(layer, "mlp", {})
        for layer in layers
    ):
        raise UserError(
            "cannot prune channels: this model's blocks have no MLP with a down_proj",
            hint="remove hidden_size and intermediate_size; prune num_layers",
        )
    inputs: dict[str, mx.array] = {}

    def record(path: str, forward, x: mx.array) -> mx.array:
        inputs[path] = x
        return forward(x)

    paths = {
        name: [f"{blocks.prefix}{index}.{name}" for index in range(len(layers))]
        for name in (INPUT_NORM, DOWN_PROJ)
    }
    with hook_calls(model, paths[INPUT_NORM] + paths[DOWN_PROJ], record):
        mx.eval(model(tokens))
    return ChannelImportance(
        _mean_magnitude(mx.concatenate([inputs[path] for path in paths[INPUT_NORM]])),
        [_mean_magnitude(inputs[path]) for path in paths[DOWN_PROJ]],
    )


def _mean_magnitude(x: mx.array) -> mx.array:
    width = x.shape[-1]
    return mx.abs(x.astype(mx.float32)).reshape(-1, width).mean(axis=0)
