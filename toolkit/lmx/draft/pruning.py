"""A student cut from a larger model: fewer blocks, narrower ones."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..models.hooks import ModuleProxy, find_blocks, replace_module

# Layers of a block by which side of them the residual stream is on.
READING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WRITING = ("o_proj", "down_proj")
# Norms of the heads, which are not as wide as the stream, unless by accident.
OF_HEADS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class ChannelImportance:
    """Mean magnitudes of activations (as in Minitron, arXiv 2407.14679).

    Attributes:
        hidden: of the residual stream, [width], over all blocks.
        inner: of the feed-forward layer of every block, [inner width].
    """

    hidden: mx.array
    inner: list[mx.array]


@dataclass(frozen=True)
class PrunedShape:
    """What is left of a model.

    Attributes:
        layers: numbers of the blocks, in their order.
        hidden_size, intermediate_size: None = as they are.
    """

    layers: tuple[int, ...]
    hidden_size: int | None = None
    intermediate_size: int | None = None

    @property
    def is_narrower(self) -> bool:
        """Whether channels go, and so must be looked at."""
        return bool(self.hidden_size or self.intermediate_size)


def pruned_config(config: dict, shape: PrunedShape) -> dict:
    """The config of a model of this shape.

    Raises:
        UserError: there is not so much of it, or it says its sizes in another way.
    """
    sizes = {"num_hidden_layers": len(shape.layers)}
    for name in ("hidden_size", "intermediate_size"):
        sizes |= {name: getattr(shape, name) or config.get(name)}
    for name, size in sizes.items():
        if not isinstance(config.get(name), int) or size is None:
            raise UserError(f"this model's config has no {name} to make smaller")
        if size > config[name]:
            raise UserError(f"{name} is {config[name]}, so {size} cannot be left")
    count = config["num_hidden_layers"]
    if shape.layers[-1] >= count:
        raise UserError(
            f"there is no block {shape.layers[-1]}: the model has {count}, from 0 on"
        )
    # What is said block by block is said of those that stay.
    lists = {
        key: [value[number] for number in shape.layers]
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
    activity: ChannelImportance | None,
) -> dict[str, mx.array]:
    """The weights of a student of this shape, by name.

    Args:
        weights: of `model`, dense.
        activity: of its channels, if it gets narrower.
    """
    prefix = find_blocks(model).prefix
    found = {}
    for name, value in weights.items():
        if not name.startswith(prefix):
            found[name] = value
            continue
        number, _, rest = name.removeprefix(prefix).partition(".")
        if int(number) in shape.layers:
            if shape.intermediate_size:
                kept = most_important(
                    activity.inner[int(number)], shape.intermediate_size
                )
                value = _inner(rest, value, kept)
            found[f"{prefix}{shape.layers.index(int(number))}.{rest}"] = value
    if shape.hidden_size:
        kept = most_important(activity.hidden, shape.hidden_size)
        width = activity.hidden.size
        found = {k: _narrow(k, v, kept, width) for k, v in found.items()}
    return found


def most_important_blocks(order: Sequence[int], kept: int) -> tuple[int, ...]:
    """Blocks to keep of those ordered by how little they are missed."""
    return tuple(sorted(order[len(order) - kept :]))


def _inner(name: str, value: mx.array, kept: mx.array) -> mx.array:
    if "gate_proj" in name or "up_proj" in name:
        return value[kept]
    return value[:, kept] if name.endswith("down_proj.weight") else value


def _narrow(name: str, value: mx.array, kept: mx.array, width: int) -> mx.array:
    """A weight between the channels of the residual stream that stay."""
    layer, _, kind = name.rpartition(".")
    last = layer.rpartition(".")[2]
    if last in OF_HEADS or (last in READING and kind == "bias"):
        return value
    if last in WRITING:
        return value[kept]
    if value.shape[-1] == width:
        return value[..., kept]
    raise UserError(
        f"it is not known how {name} gets narrower",
        hint="leave hidden_size out, and cut layers or intermediate_size",
    )


# --- from draft.activity: How active the channels of a model are: those that are not can go.


def channel_importance(model: nn.Module, tokens: mx.array) -> ChannelImportance:
    """Run tokens [1, L] and look at what goes through the blocks.

    Raises:
        UserError: the feed-forward layers are not the usual ones.
    """
    blocks = find_blocks(model)
    layers = blocks.trunk[blocks.name] if blocks else []
    if not layers or not all(_is_usual(layer) for layer in layers):
        raise UserError(
            "this model's blocks have no feed-forward layer with a down_proj",
            hint="leave hidden_size and intermediate_size out, and cut layers alone",
        )
    streams, inner = [], []
    with ExitStack() as stack:
        for layer in layers:
            norm, down = "input_layernorm", "down_proj"
            seen = _recording(layer[norm], streams.append)
            stack.enter_context(replace_module(layer, norm, seen))
            seen = _recording(layer.mlp[down], inner.append)
            stack.enter_context(replace_module(layer.mlp, down, seen))
        mx.eval(model(tokens))
    return ChannelImportance(
        _mean(mx.concatenate(streams)), [_mean(part) for part in inner]
    )


def most_important(activity: mx.array, count: int) -> mx.array:
    """Numbers of the channels to keep, in their order."""
    return mx.sort(mx.argsort(-activity)[:count])


def _is_usual(layer: nn.Module) -> bool:
    return "input_layernorm" in layer and "down_proj" in getattr(layer, "mlp", {})


def _recording(module: nn.Module, record: Callable) -> ModuleProxy:
    def call(x):
        record(x)
        return module(x)

    return ModuleProxy(module, call)


def _mean(x: mx.array) -> mx.array:
    width = x.shape[-1]
    return mx.abs(x.astype(mx.float32)).reshape(-1, width).mean(axis=0)
