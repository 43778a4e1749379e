"""Gradient checkpointing (arXiv 1604.06174): blocks run again in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from .blocks import Blocks, StandIn, swapped


@contextmanager
def recomputed(blocks: Blocks) -> Iterator[None]:
    """Of every block only inputs and outputs are kept while the context is open.

    The model is as before when it closes. Backward passes may come later.
    """
    stand_ins = [
        block if isinstance(block, StandIn) else StandIn(block, _recompute(block))
        for block in blocks.trunk[blocks.name]
    ]
    with swapped(blocks.trunk, blocks.name, stand_ins):
        yield


def _recompute(block: nn.Module):
    def call(*arguments, **settings):
        leaves = [leaf for _, leaf in tree_flatten([arguments, settings])]
        arrays = [leaf for leaf in leaves if isinstance(leaf, mx.array)]
        # Dropout must draw the second time what it drew the first.
        key, mx.random.state[0] = mx.random.split(mx.random.state[0])

        def run(parameters, arrays):
            given = iter(arrays)
            args, kwargs = tree_map(
                lambda leaf: next(given) if isinstance(leaf, mx.array) else leaf,
                (arguments, settings),
            )
            with _parameters(block, parameters), _random_state(key):
                return block(*args, **kwargs)

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


@contextmanager
def _random_state(key: mx.array) -> Iterator[None]:
    before, mx.random.state[0] = mx.random.state[0], key
    try:
        yield
    finally:
        mx.random.state[0] = before
