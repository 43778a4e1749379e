"""How active the channels of a model are: those that are not can go."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..model.blocks import StandIn, find_blocks, swapped


@dataclass(frozen=True)
class Activity:
    """Mean magnitudes of activations (as in Minitron, arXiv 2407.14679).

    Attributes:
        hidden: of the residual stream, [width], over all blocks.
        inner: of the feed-forward layer of every block, [inner width].
    """

    hidden: mx.array
    inner: list[mx.array]


def watch(model: nn.Module, tokens: mx.array) -> Activity:
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
            stack.enter_context(swapped(layer, norm, seen))
            seen = _recording(layer.mlp[down], inner.append)
            stack.enter_context(swapped(layer.mlp, down, seen))
        mx.eval(model(tokens))
    return Activity(_mean(mx.concatenate(streams)), [_mean(part) for part in inner])


def most_active(activity: mx.array, count: int) -> mx.array:
    """Numbers of the channels to keep, in their order."""
    return mx.sort(mx.argsort(-activity)[:count])


def _is_usual(layer: nn.Module) -> bool:
    return "input_layernorm" in layer and "down_proj" in getattr(layer, "mlp", {})


def _recording(module: nn.Module, record: Callable) -> StandIn:
    def call(x):
        record(x)
        return module(x)

    return StandIn(module, call)


def _mean(x: mx.array) -> mx.array:
    width = x.shape[-1]
    return mx.abs(x.astype(mx.float32)).reshape(-1, width).mean(axis=0)
