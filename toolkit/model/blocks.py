"""Where a model keeps its blocks, and how to put something in a module's place."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn


@dataclass(frozen=True)
class Blocks:
    """The list of a model's blocks.

    Attributes:
        path: of the module that holds the list, its trunk.
        name: of the list in the trunk.
    """

    trunk: nn.Module
    path: str
    name: str

    @property
    def prefix(self) -> str:
        """What the names of all parameters of the blocks begin with."""
        return f"{self.path}.{self.name}." if self.path else f"{self.name}."


def find_blocks(model: nn.Module) -> Blocks | None:
    """The blocks that `model.layers` names; None if there are none."""
    layers = getattr(model, "layers", None)
    if not layers:
        return None
    for path, module in model.named_modules():
        for name, value in module.items():
            if isinstance(value, list) and any(block is layers[0] for block in value):
                return Blocks(module, path, name)
    return None


class StandIn:
    """Is called in a module's place; all else is the module's, even its class."""

    def __init__(self, module: nn.Module, call):
        self._module = module
        self._call = call

    def __call__(self, *arguments, **settings):
        return self._call(*arguments, **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    # Some models ask by `isinstance` what a block is, to give it its mask.
    @property
    def __class__(self) -> type:
        return type(self._module)


@contextmanager
def swapped(owner: nn.Module, name: str, other: Any) -> Iterator[None]:
    """`other` in the place of a module's child, of this instance alone, for a while."""
    before = owner[name]
    owner[name] = other
    try:
        yield
    finally:
        owner[name] = before


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """A model in training, in which no kernel is used that has no derivative."""
    before = model.training
    model.train()
    try:
        yield
    finally:
        model.train(before)
