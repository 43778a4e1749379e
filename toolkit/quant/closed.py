"""A block shown to others once it is quantized, and given better codes by them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..model.blockwise import Blockwise
from . import streams
from .streams import FULL, ROUNDED


@dataclass(frozen=True)
class Passage:
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
        hidden = streams.load(self.before, ROUNDED, self.part)["hidden"]
        return hidden, streams.load(self.after, FULL, self.part)["hidden"]


@dataclass(frozen=True)
class Closed:
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
    passages: list[Passage]


def close_block(
    blockwise: Blockwise,
    number: int,
    tensors: dict[str, mx.array],
    tokens: list[mx.array],
    before: Path,
    after: Path,
) -> Closed:
    """A block as it can be improved.

    Args:
        tensors: what is stored of it, by name in the model.
        tokens: int32 [n, L], in parts.
        before, after: where the hidden states around the block are.
    """
    return Closed(
        f"{blockwise.prefix}{number}.",
        blockwise.blocks[number],
        tensors,
        partial(blockwise.run, number),
        [Passage(t, part, before, after) for part, t in enumerate(tokens)],
    )
