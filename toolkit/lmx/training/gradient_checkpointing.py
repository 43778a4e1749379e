"""Gradient checkpointing (arXiv 1604.06174): blocks run again in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..errors import UserError
from ..models.hooks import ModuleProxy, TransformerBlocks, replace_module


@contextmanager
def checkpointed(
    blocks: TransformerBlocks, forward: Callable = lambda number, block: block
) -> Iterator[None]:
    """Of every block only inputs and outputs are kept while the context is open.

    The model is as before when it closes. Backward passes may come later.

    Args:
        forward: what to call for a block, both times, by its number and the block.

    Raises:
        UserError: in the forward pass, where blocks are given a cache.
    """
    stand_ins = [
        block
        if isinstance(block, ModuleProxy)
        else ModuleProxy(block, _recompute(block, forward(number, block)))
        for number, block in enumerate(blocks.trunk[blocks.name])
    ]
    with replace_module(blocks.trunk, blocks.name, stand_ins):
        yield


def _recompute(block: nn.Module, forward: Callable):
    def call(*arguments, **settings):
        leaves = [leaf for _, leaf in tree_flatten([arguments, settings])]
        arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
        # What a block writes to a cache has no gradient when the block runs again.
        if any(hasattr(type(leaf), "state") for leaf in leaves):
            raise UserError(
                "the blocks of this architecture share keys through a cache",
                hint="gradient_checkpointing: false",
            )
        # Dropout must draw the second time what it drew the first.
        draws = _dropouts(block)

        def run(parameters, arrays):
            given = iter(arrays)
            args, kwargs = tree_map(
                lambda leaf: next(given) if isinstance(leaf, mx.array) else leaf,
                (arguments, settings),
            )
            with _parameters(block, parameters), _all_swapped(draws):
                return forward(*args, **kwargs)

        # Gradients come only to what is handed in: trained parameters and arrays.
        return mx.checkpoint(run)(block.trainable_parameters(), arrays)

    return call


@contextmanager
def _parameters(block: nn.Module, parameters: dict) -> Iterator[None]:
    # A block may be called twice, and the second call needs the real ones.
    before = block.trainable_parameters()
    block.update(parameters)
    try:
        yield
    finally:
        block.update(before)


class _RecordedDropout:
    """Dropout with a random state of its own instead of the global one."""

    def __init__(self, keep: float, key: mx.array):
        self._keep = keep
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        mask = mx.random.bernoulli(self._keep, x.shape, self._key)
        return (mask * x) * (1 / self._keep)


def _dropouts(block: nn.Module) -> list[tuple[nn.Module, str, _RecordedDropout]]:
    """Owner, name and stand-in of every dropout that is at work in a block."""
    found = [
        (owner, name, child._p_1)
        for _, owner in block.named_modules()
        for name, child in owner.items()
        if isinstance(child, nn.Dropout) and child.training and child._p_1 < 1
    ]
    if not found:
        return []
    keys = mx.random.randint(0, 1 << 31, (len(found), 2), dtype=mx.uint32)
    pairs = zip(found, keys, strict=True)
    return [
        (owner, name, _RecordedDropout(keep, key)) for (owner, name, keep), key in pairs
    ]


@contextmanager
def _all_swapped(draws) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, drawn in draws:
            stack.enter_context(replace_module(owner, name, drawn))
        yield
