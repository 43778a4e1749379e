"""A block shown to others before it is quantized, and given other weights by them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..model.blockwise import Blockwise, cast
from . import streams
from .folding import Run, Weights, put
from .streams import ROUNDED


@dataclass(frozen=True)
class Opened:
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
    parts: list[tuple[Run, mx.array]]


# Gives a block other weights to quantize, by which it makes the same.
Prepare = Callable[[Opened], Weights]


def prepare_block(
    prepare: Prepare,
    blockwise: Blockwise,
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
    after = prepare(Opened(prefix, block, wide, dtypes, paths, parts))
    changed = {name: v for name, v in after.items() if v is not wide[name]}
    put(block, before | {n: cast(v, before[n].dtype) for n, v in changed.items()})
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
        hidden = streams.load(here, ROUNDED, number)["hidden"][rows]
        call = partial(_run, run, tokens[number][rows])
        parts.append((call, hidden.astype(mx.float32)))
    return parts


def _run(run: Callable, tokens: mx.array, hidden: mx.array) -> mx.array:
    return run(tokens[: len(hidden)], hidden)
