"""Gradient checkpointing (arXiv 1604.06174): the backward pass runs blocks again.

`mlx.nn.utils.checkpoint` does the recomputation. It leaves its traced parameters in the
module, repeats dropout with other random numbers, and drops gradients through a cache:
this module restores the parameters, replays dropout, and refuses such caches.
"""

from collections.abc import Callable
from contextlib import ExitStack

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from ..errors import UserError
from ..models.hooks import replace_module


def checkpointed(block: nn.Module, forward: Callable) -> Callable:
    """A forward pass of a block that keeps only its inputs and outputs.

    Args:
        forward: the block's own.

    Raises (when called):
        UserError: the block is called with a cache.
    """

    def call(*args, **kwargs):
        leaves = [leaf for _, leaf in tree_flatten([args, kwargs])]
        arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
        # What a block writes to a cache has no gradient when the block runs again.
        if any(hasattr(type(leaf), "state") for leaf in leaves):
            raise UserError(
                "the blocks of this architecture share keys through a cache",
                hint="gradient_checkpointing: false",
            )
        dropouts = _replayed_dropouts(block)
        parameters = block.trainable_parameters()

        def run(arrays):
            remaining = iter(arrays)
            traced_args, traced_kwargs = tree_map(
                lambda leaf: next(remaining) if isinstance(leaf, mx.array) else leaf,
                (args, kwargs),
            )
            try:
                with ExitStack() as stack:
                    for owner, name, dropout in dropouts:
                        stack.enter_context(replace_module(owner, name, dropout))
                    return forward(*traced_args, **traced_kwargs)
            finally:
                # A block may be called twice; the second call needs these.
                block.update(parameters)

        # Only trained parameters and arguments that are arrays get gradients.
        return nn.utils.checkpoint(block, run)(arrays)

    return call


class _ReplayedDropout:
    """Dropout with a fixed random key, so that a second run drops the same values."""

    def __init__(self, keep: float, key: mx.array):
        self._keep = keep
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        mask = mx.random.bernoulli(self._keep, x.shape, self._key)
        return (mask * x) * (1 / self._keep)


def _replayed_dropouts(
    block: nn.Module,
) -> list[tuple[nn.Module, str, _ReplayedDropout]]:
    """Owner, name and replacement of every active dropout of a block."""
    active = [
        (owner, name, child._p_1)
        for _, owner in block.named_modules()
        for name, child in owner.items()
        if isinstance(child, nn.Dropout) and child.training and child._p_1 < 1
    ]
    if not active:
        return []
    keys = mx.random.randint(0, 1 << 31, (len(active), 2), dtype=mx.uint32)
    return [
        (owner, name, _ReplayedDropout(keep, key))
        for (owner, name, keep), key in zip(active, keys, strict=True)
    ]
