"""A model run block by block, with the weights of one block in memory at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from ..cpu import malloc
from ..errors import UserError
from .hooks import ModuleProxy, find_blocks, replace_module

# What a block that is called in another way fails with.
FAULTS = (AttributeError, TypeError, KeyError, ValueError)


class BlockwiseModel:
    """A model as a sequence of blocks.

    Args:
        model: its weights may be unread.
        reread: gives the same model, its weights unread, to put them in the place of
            those that were used; None = weights stay in memory.

    Attributes:
        blocks: the model's own.
        prefix: what the names of all their parameters begin with, before the number.

    Raises:
        UserError: the model has no list of blocks.
    """

    def __init__(self, model: nn.Module, reread: Callable[[], nn.Module] | None = None):
        found = find_blocks(model)
        if found is None:
            raise UserError(
                "this model has no list of blocks to walk through", hint="method: rtn"
            )
        self.model = model
        self.reread = reread
        self.prefix = found.prefix
        self._trunk, self._name = found.trunk, found.name
        self.blocks: list[nn.Module] = list(found.trunk[found.name])
        self._unread: dict[int, nn.Module] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def first(self, tokens: mx.array) -> mx.array:
        """Hidden states [B, L, width] in front of the first block."""
        return self._arguments(0, tokens)[0][0]

    def run(self, number: int, tokens: mx.array, hidden: mx.array) -> mx.array:
        """What a block makes of hidden states [B, L, width]."""
        arguments, settings = self._arguments(number, tokens)
        return self.blocks[number](hidden, *arguments[1:], **settings)

    def last(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """The logits [B, L, vocabulary] of what comes out of the last block."""
        calls = [lambda *_, **__: hidden] + [_identity] * (len(self) - 1)
        with self._replaced(calls):
            return self.model(tokens)

    def logits(
        self,
        parts: list[mx.array],
        *,
        compute: mx.Dtype | None = None,
        folder: Path | None = None,
    ) -> Iterator[mx.array]:
        """The logits [B, L, vocabulary] of every part of the tokens, one by one.

        Args:
            parts: tokens [B, L], as many as are run at once.
            compute: the type to run blocks in; None = as the model is.
            folder: where hidden states are kept; None = in memory.
        """
        hidden = [
            _kept(self.first(tokens), number, folder)
            for number, tokens in enumerate(parts)
        ]
        for block in range(len(self)):
            with self.at_hand(block, compute):
                for number, tokens in enumerate(parts):
                    outputs = self.run(block, tokens, hidden[number])
                    hidden[number] = _kept(outputs, number, folder)
        for tokens in parts:
            yield self.last(tokens, hidden.pop(0))
        self.let_go()

    @contextmanager
    def at_hand(
        self, number: int, compute: mx.Dtype | None = None
    ) -> Iterator[nn.Module]:
        """A block to be used, its floating weights in `compute`; then they are let go.

        The block is as it was afterwards, whatever weights it was given.
        """
        block = self.blocks[number]
        before = None if self.reread else block.parameters()
        if compute is not None:
            block.update(tree_map(lambda v: cast(v, compute), block.parameters()))
        try:
            yield block
        finally:
            block.update(before or self._take_unread(number).parameters())
            mx.clear_cache()
            malloc.trim()

    def let_go(self) -> None:
        """Let go of all weights that were read, those outside the blocks too."""
        if self.reread:
            self.model.update(self.reread().parameters())

    def check(self, tokens: mx.array) -> None:
        """That block after block makes what the model makes.

        Raises:
            UserError: something else comes out, or a block does not run by itself.
        """
        order: list[int] = []
        try:
            own = self.first(tokens)

            def in_both_ways(number: int):
                def call(*arguments, **settings):
                    nonlocal own
                    order.append(number)
                    with self.at_hand(number) as block:
                        output = block(*arguments, **settings)
                        own = self.run(number, tokens, own)
                        mx.eval(output, own)
                    return output

                return call

            with self._replaced([in_both_ways(i) for i in range(len(self))]):
                expected = self.model(tokens)
            off = mx.abs(self.last(tokens, own) - expected)
        except FAULTS as error:
            raise _no_sequence(error) from error
        if order != list(range(len(self))):
            raise _no_sequence("they are not called once each, one after the other")
        if not (off.max() <= 1e-3 * mx.abs(expected).max()).item():
            raise _no_sequence("other logits come out")

    def _arguments(self, number: int, tokens: mx.array) -> tuple[tuple, dict]:
        """What the model calls a block with, were all before it the identity."""
        calls: dict[int, tuple] = {}

        def passing(index: int):
            def call(*arguments, **settings):
                calls[index] = (arguments, settings)
                return arguments[0]

            return call

        with self._replaced([passing(i) for i in range(len(self))]):
            self.model(tokens)
        return calls[number]

    def _replaced(self, calls: list):
        pairs = zip(self.blocks, calls, strict=True)
        return replace_module(
            self._trunk, self._name, [ModuleProxy(*pair) for pair in pairs]
        )

    def _take_unread(self, number: int) -> nn.Module:
        """A block like this one, its weights unread."""
        if number not in self._unread:
            found = find_blocks(self.reread())
            self._unread = dict(enumerate(found.trunk[found.name]))
        return self._unread.pop(number)


def cast(value: mx.array, dtype: mx.Dtype) -> mx.array:
    """Floating numbers in `dtype`; codes as they are."""
    return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value


def _identity(hidden: mx.array, *_, **__) -> mx.array:
    return hidden


def _kept(hidden: mx.array, part: int, folder: Path | None) -> mx.array:
    """The same states, in memory, or unread from a file."""
    mx.eval(hidden)
    if folder is None:
        return hidden
    path = str(folder / f"hidden-{part:04d}.safetensors")
    mx.save_safetensors(path, {"hidden": hidden})
    return mx.load(path)["hidden"]


def _no_sequence(reason) -> UserError:
    return UserError(
        f"the blocks of this model cannot be run one by one: {reason}",
        hint="method: rtn",
    )
