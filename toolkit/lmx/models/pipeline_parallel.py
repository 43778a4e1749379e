"""Pipeline parallelism: every process holds consecutive layers of one model.

It serves the architectures of mlx-lm that have `pipeline` and no `shard`. mlx-lm
chooses the layers of a rank, the first ones for the last rank. One rank after the other
computes its layers. Then all get the hidden states of rank 0, and each computes the
same logits. The code in mlx-lm's models that communicates knows only mlx-lm's caches,
and all processes of a job as one group. So here the first and the last block of a rank
communicate.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UserError
from ..interfaces import Communicator
from .hooks import find_blocks, hook_calls, put_in_front


@dataclass(frozen=True)
class Place:
    """A place in a group of processes; MLX divides weights with nothing else."""

    index: int
    count: int

    def rank(self) -> int:
        """The number of this process."""
        return self.index

    def size(self) -> int:
        """The number of processes."""
        return self.count


def can_divide_by_layers(model: nn.Module) -> bool:
    """Whether mlx-lm divides a model by layers only."""
    trunk = getattr(model, "model", None)
    return not hasattr(model, "shard") and hasattr(trunk, "pipeline")


def is_divided_by_layers(model: nn.Module) -> bool:
    """Whether this process holds some layers of a model only."""
    return own_layers(model).stop is not None


def own_layers(model: nn.Module) -> slice:
    """The layers that this process holds; all, if the model is not divided by them."""
    trunk = getattr(model, "model", None)
    return slice(getattr(trunk, "start_idx", 0), getattr(trunk, "end_idx", None))


def layers_by_rank(model: nn.Module, size: int) -> list[slice]:
    """The layers that each of `size` processes will hold.

    Raises:
        ValueError: a process would have none, or none of some kind. Then its caches
            would be of other kinds, and it would take other steps than the rest.
    """
    kinds = [type(layer_cache).__name__ for layer_cache in model.make_cache()]
    layers = []
    for rank in range(size):
        trunk = copy.copy(model.model)
        trunk.pipeline(Place(rank, size))
        layers.append(slice(trunk.start_idx, trunk.end_idx))
        if missing := {*kinds} - {*kinds[layers[-1]]}:
            raise ValueError(f"process {rank} would have no layer with {min(missing)}")
    return layers


def largest_share(model: nn.Module, size: int) -> float:
    """The share of the weights of the process that holds most. Nothing is computed.

    Raises:
        ValueError: see `layers_by_rank`.
    """
    whole = _parameters(model)
    by_layer = [*map(_parameters, model.layers)]
    most = max(sum(by_layer[layers]) for layers in layers_by_rank(model, size))
    return (whole - sum(by_layer) + most) / whole


def divide_by_layers(model: nn.Module, group: Communicator) -> None:
    """Keep the layers of this rank, in place. Weights may be unread, and stay so.

    Raises:
        ValueError: see `layers_by_rank`.
        UserError: ranks could not know the dtype of what they receive.
    """
    layers_by_rank(model, group.size)
    dtypes: set[str] = set()

    def record(_, forward: Callable, x: mx.array, *args: Any, **kwargs: Any):
        y = forward(x, *args, **kwargs)
        dtypes.update(str(each.dtype).removeprefix("mlx.core.") for each in (x, y))
        return y

    prefix = find_blocks(model).prefix
    paths = [f"{prefix}{index}" for index in range(len(model.layers))]
    with hook_calls(model, paths, record):
        # Only dtypes are used, so nothing is computed.
        model(mx.zeros((1, 1), mx.int32))
    # All blocks must give what the embedding does.
    if len(dtypes) > 1:
        raise UserError(
            f"the hidden states are {' and '.join(sorted(dtypes))} in different "
            "layers, which therefore cannot be divided among processes"
        )
    trunk = model.model
    trunk.pipeline(group.group)
    # mlx-lm communicates no more.
    trunk.pipeline_rank, trunk.pipeline_size = 0, 1
    held = trunk.pipeline_layers
    if group.rank < group.size - 1:
        put_in_front(FirstBlock, held[0])
    put_in_front(LastBlock, held[-1])
    held[0].ranks = held[-1].ranks = group


def compile_for(*models: nn.Module) -> Callable[[Callable], Callable]:
    """A decorator: `mx.compile` for functions of models, if it may.

    What ranks exchange must keep the order that it has in Python.
    """
    is_divided = any(map(is_divided_by_layers, models))
    return (lambda function: function) if is_divided else mx.compile


def require_all_layers(model: nn.Module, *, place: str) -> None:
    """Refuse a drafter that reads layers of other processes.

    Raises:
        UserError: with the drafters that work.
    """
    if is_divided_by_layers(model):
        raise UserError(
            "this drafter reads hidden states of the model, whose layers are divided "
            "among processes",
            place=place,
            hint="use a draft model, or prompt-lookup",
        )


class FirstBlock:
    """A class in front of a block's, whose input comes from the rank above."""

    ranks: Communicator

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        ranks = self.ranks
        x = mx.distributed.recv_like(x, ranks.rank + 1, group=ranks.group)
        return super().__call__(x, *args, **kwargs)


class LastBlock:
    """A class in front of a block's. All ranks get the output of the one on rank 0."""

    ranks: Communicator

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        ranks = self.ranks
        y = super().__call__(x, *args, **kwargs)
        if not ranks.is_first:
            y = mx.distributed.send(y, ranks.rank - 1, group=ranks.group)
        y = ranks.all_gather(y)[: len(y)]
        # At once: so all ranks communicate in the order of their passes, and those of
        # which one needs no more than its caches have an end on the others, too.
        mx.async_eval(y)
        return y


def _parameters(model: nn.Module) -> int:
    return sum(value.size for _, value in tree_flatten(model.parameters()))
