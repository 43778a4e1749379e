"""A block shown to others before it is quantized, and given other weights by them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...models.blockwise import BlockwiseModel, cast
from . import activation_cache
from .activation_cache import FULL, ROUNDED

Weights = dict[str, mx.array]
# Hidden states [B, L, width] to what the block makes of them.
BlockForward = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class BlockContext:
    """A block that is about to be quantized.

    Attributes:
        prefix: what its paths begin with in the model.
        weights: float32, its parameters by name in it, as the block has them.
        dtypes: what they are stored in.
        paths: in it, of the layers to quantize.
        parts: two lots of hidden states [B, L, width], float32, as the quantized model
            has them, and what the block makes of them or of the first rows of them.
    """

    prefix: str
    block: nn.Module
    weights: Weights
    dtypes: dict[str, mx.Dtype]
    paths: list[str]
    parts: list[tuple[BlockForward, mx.array]]


def set_weights(block: nn.Module, weights: Weights) -> None:
    """Give a block other parameters, by their names in it."""
    block.update(tree_unflatten(list(weights.items())))


# Gives a block other weights to quantize, by which it makes the same.
Prepare = Callable[[BlockContext], Weights]


def prepare_block(
    prepare: Prepare,
    blockwise: BlockwiseModel,
    number: int,
    paths: list[str],
    tokens: list[mx.array],
    here: Path,
    dtypes: dict[str, mx.Dtype],
) -> Weights:
    """Give a block the weights that it is to have.

    Args:
        paths: in the block, of the layers to quantize.
        tokens: int32 [n, L], in parts.
        here: where the hidden states in front of the block are.
        dtypes: what its parameters are stored in.

    Returns:
        Those that changed and are not to be quantized, by name in the model.
    """
    block, prefix = blockwise.blocks[number], f"{blockwise.prefix}{number}."
    before = dict(tree_flatten(block.parameters()))
    wide = {name: cast(value, mx.float32) for name, value in before.items()}
    parts = _parts(partial(blockwise.run, number), tokens, here)
    after = prepare(BlockContext(prefix, block, wide, dtypes, paths, parts))
    changed = {name: v for name, v in after.items() if v is not wide[name]}
    set_weights(
        block, before | {n: cast(v, before[n].dtype) for n, v in changed.items()}
    )
    to_round = {f"{path}.weight" for path in paths}
    return {
        prefix + name: cast(value, dtypes[name])
        for name, value in changed.items()
        if name not in to_round
    }


def _parts(run: Callable, tokens: list[mx.array], here: Path):
    """The first part of the tokens and another; its halves where it is the only one."""
    if len(tokens) > 1:
        chosen = [(number, slice(None)) for number in (0, len(tokens) // 2)]
    else:
        half = (len(tokens[0]) + 1) // 2
        chosen = [(0, slice(half)), (0, slice(-half, None))]
    parts = []
    for number, rows in chosen:
        hidden = activation_cache.load(here, ROUNDED, number)["hidden"][rows]
        call = partial(_run, run, tokens[number][rows])
        parts.append((call, hidden.astype(mx.float32)))
    return parts


def _run(run: Callable, tokens: mx.array, hidden: mx.array) -> mx.array:
    return run(tokens[: len(hidden)], hidden)


# --- from quant.closed: A block shown to others once it is quantized, and given better codes by them.


@dataclass(frozen=True)
class ActivationShard:
    """A part of the tokens on its way through a block.

    Attributes:
        tokens: int32 [B, L].
        before, after: the folders of the hidden states around the block.
    """

    tokens: mx.array
    part: int
    before: Path
    after: Path

    def states(self) -> tuple[mx.array, mx.array]:
        """Hidden states [B, L, width], unread: what goes in, in the quantized model,
        and what comes out, in the full one."""
        hidden = activation_cache.load(self.before, ROUNDED, self.part)["hidden"]
        return hidden, activation_cache.load(self.after, FULL, self.part)["hidden"]


@dataclass(frozen=True)
class QuantizedBlock:
    """A block whose layers are all quantized.

    Attributes:
        prefix: what its paths begin with in the model.
        tensors: what is stored of it, by name in the model.
        run: tokens and hidden states to what the block makes of them.
    """

    prefix: str
    block: nn.Module
    tensors: dict[str, mx.array]
    run: Callable[[mx.array, mx.array], mx.array]
    passages: list[ActivationShard]


def close_block(
    blockwise: BlockwiseModel,
    number: int,
    tensors: dict[str, mx.array],
    tokens: list[mx.array],
    before: Path,
    after: Path,
) -> QuantizedBlock:
    """A block as it can be improved.

    Args:
        tensors: what is stored of it, by name in the model.
        tokens: int32 [n, L], in parts.
        before, after: where the hidden states around the block are.
    """
    return QuantizedBlock(
        f"{blockwise.prefix}{number}.",
        blockwise.blocks[number],
        tensors,
        partial(blockwise.run, number),
        [ActivationShard(t, part, before, after) for part, t in enumerate(tokens)],
    )
