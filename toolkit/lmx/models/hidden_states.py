"""Hidden states of a target model: the outputs of chosen transformer blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from .hooks import find_blocks, hook_calls

HINT = "architecture: model works with every target"


def forward_with_hidden_states(
    model: nn.Module, tokens: mx.array, layer_ids: Sequence[int], **kwargs
) -> tuple[mx.array, mx.array]:
    """Logits [B, L, V], and the outputs of blocks side by side, [B, L, n * width].

    Args:
        tokens: int [B, L].
        layer_ids: n blocks, counted from 0, in ascending order.
        kwargs: passed to the model.
    """
    outputs = []

    def record(_, forward: Callable, *args, **kwargs) -> Any:
        outputs.append(forward(*args, **kwargs))
        return outputs[-1]

    prefix = find_blocks(model).prefix
    with hook_calls(model, [f"{prefix}{index}" for index in layer_ids], record):
        logits = model(tokens, **kwargs)
    return logits, mx.concatenate(outputs, axis=-1)


def require_hidden_states(
    model: nn.Module, layer_ids: Sequence[int], *, place: str
) -> int:
    """Check that the outputs of these blocks can be recorded; returns their width.

    Raises:
        UserError: the model has no list of blocks, or too few, or a block does not
            return one array [B, L, width].
    """
    blocks = find_blocks(model)
    if blocks is None:
        raise UserError("this model has no list of blocks", place=place, hint=HINT)
    count = len(blocks.trunk[blocks.name])
    if not layer_ids or min(layer_ids) < 0 or max(layer_ids) >= count:
        raise UserError(
            f"the target has blocks 0 to {count - 1}, the drafter reads {layer_ids}",
            place=place,
        )
    try:
        _, states = forward_with_hidden_states(
            model, mx.zeros((1, 3), mx.int32), layer_ids
        )
        ndim, length = states.ndim, states.shape[1]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"the outputs of this model's blocks cannot be recorded: {error}",
            place=place,
            hint=HINT,
        ) from error
    if ndim != 3 or length != 3:
        raise UserError(
            "a block of this model does not return one hidden state per token",
            place=place,
            hint=HINT,
        )
    return states.shape[-1] // len(layer_ids)
