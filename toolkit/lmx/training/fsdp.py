"""Fully sharded training: every process keeps a share of the trained parameters.

As `mlx.nn.fully_shard` does (ZeRO's third stage, arXiv 1910.02054): what a block
computes with is gathered when it runs, and its gradients go back to the shares as sums.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..models.hooks import ModuleProxy, TransformerBlocks, replace_module
from ..run.distributed import ProcessGroup
from ..run.launcher import backend


class ShardedParameters:
    """Which parameters are cut along their first axis, and how to have them whole.

    Those whose first axis the number of processes does not divide stay whole. All
    methods that gather must be called by all processes, in the same order.

    Args:
        parameters: of the model, by path, whole; none = nothing is cut.
        compute: type of the forward pass, to which shares are cast before they travel.
        blocks: of which each is gathered by itself, when it runs; all else is there
            from the beginning of the forward pass to the end of the backward pass.
    """

    def __init__(
        self,
        parameters: dict[str, mx.array],
        ranks: ProcessGroup,
        *,
        compute: mx.Dtype,
        blocks: TransformerBlocks | None,
    ):
        self._ranks = ranks
        self._compute = compute
        self._blocks = blocks
        self._shapes = {
            path: value.shape
            for path, value in parameters.items()
            if value.ndim and value.shape[0] % ranks.size == 0
        }
        # What was sent last, and what the block before went in with: see `_send`.
        self._last: list[mx.array] = []
        self._earlier: list[mx.array] = []

    def __contains__(self, path: str) -> bool:
        return path in self._shapes

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def cut(self, path: str, value: mx.array) -> mx.array:
        """This process's rows of a parameter, or of something of its shape."""
        if path not in self:
            return value
        rows = len(value) // self._ranks.size
        first = self._ranks.rank * rows
        # A copy: a slice would hold on to the whole.
        return mx.contiguous(value[first : first + rows])

    def whole(self, path: str, value: mx.array) -> mx.array:
        """What `cut` has cut, gathered from all processes and computed."""
        if path in self:
            value = self._ranks.all_gather(value)
        mx.eval(value)
        return value

    def shape(self, path: str, value: mx.array) -> tuple[int, ...]:
        """The shape of what `cut` has cut."""
        return self._shapes.get(path, value.shape)

    def all_sum(
        self, numbers: list[mx.array], gradients: dict[str, mx.array]
    ) -> tuple[list[mx.array], dict[str, mx.array]]:
        """Numbers and gradients of all processes; those of shares are summed before."""
        own = {path: value for path, value in gradients.items() if path in self}
        rest = {path: value for path, value in gradients.items() if path not in self}
        # After everything that was sent in the backward pass.
        numbers = mx.depends(numbers, list(own.values())) if own else numbers
        sums = self._ranks.all_sum([*numbers, *rest.values()])
        count = len(numbers)
        return sums[:count], own | dict(zip(rest, sums[count:], strict=True))

    def norm(self, gradients: dict[str, mx.array]) -> mx.array:
        """The joint norm of gradients, those of shares over all processes."""
        squares = {path: mx.square(value).sum() for path, value in gradients.items()}
        rest = [value for path, value in squares.items() if path not in self]
        if not self:
            return mx.sqrt(sum(rest))
        own = sum(value for path, value in squares.items() if path in self)
        # After the sums of the rest: one message after the other.
        [own] = self._ranks.all_sum(mx.depends([own], rest))
        return mx.sqrt(own + sum(rest))

    def placed(self, parameters: dict[str, mx.array]) -> dict[str, mx.array]:
        """What to put into the model: all that is in no block whole, in its type.

        The shares of blocks stay float32, so that their gradients are.
        """
        self._last, self._earlier = [], []
        weights = {
            path: value if path in self else value.astype(self._compute)
            for path, value in parameters.items()
        }
        prefix = self._blocks.prefix if self._blocks else None
        apart = [p for p in self._shapes if not (prefix and p.startswith(prefix))]
        return weights | self._gather({path: parameters[path] for path in apart})

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Every block is whole while it runs; backward passes may come later."""
        blocks = self._blocks
        if not (self and blocks):
            yield
            return
        stand_ins = [
            ModuleProxy(block, self.forward(number, block))
            for number, block in enumerate(blocks.trunk[blocks.name])
        ]
        with replace_module(blocks.trunk, blocks.name, stand_ins):
            yield

    def forward(self, number: int, block: nn.Module) -> Callable:
        """A block's call, for which its shares are gathered."""
        if not self:
            return block
        prefix = f"{self._blocks.prefix}{number}."

        def call(*arguments, **settings):
            flat = tree_flatten([arguments, settings])
            arrays = [leaf for _, leaf in flat if isinstance(leaf, mx.array)]
            own = tree_flatten(block.trainable_parameters())
            shares = {prefix + path: v for path, v in own if prefix + path in self}
            # Not before the block before this one begins, or all would be there at
            # once; not after it ends either, so that sending takes no time of its own.
            whole = self._gather(shares, self._earlier)
            self._earlier = [mx.stop_gradient(array) for array in arrays]
            with _in_place(block, whole, prefix):
                return block(*arguments, **settings)

        return call

    def _gather(
        self, shares: dict[str, mx.array], after: list[mx.array] | None = None
    ) -> dict[str, mx.array]:
        """Whole parameters in the compute type, all of them in one message."""
        if not shares:
            return {}
        size = self._ranks.size
        ends = list(accumulate(value.size for value in shares.values()))[:-1]
        shapes = [self._shapes[path] for path in shares]

        @mx.custom_function
        def gather(shares):
            rows = [v.astype(self._compute).reshape(1, -1) for v in shares]
            flat = mx.concatenate(rows, axis=1)
            whole = self._send(self._ranks.all_gather, flat, after or [])
            parts = mx.split(whole, ends, axis=1)
            return [v.reshape(shape) for v, shape in zip(parts, shapes, strict=True)]

        @gather.vjp
        def _(shares, cotangents, _):
            rows = [v.astype(mx.float32).reshape(size, -1) for v in cotangents]
            flat = mx.concatenate(rows, axis=1)
            own = self._send(self._ranks.reduce_scatter, flat, [])
            parts = mx.split(own, ends, axis=1)
            return [v.reshape(s.shape) for v, s in zip(parts, shares, strict=True)]

        return dict(zip(shares, gather(list(shares.values())), strict=True))

    def _send(self, way: Callable, value: mx.array, after: list[mx.array]) -> mx.array:
        # One message after the other, in the same order in all processes.
        [value] = mx.depends([value], [*self._last, *after])
        self._last = [way(value)]
        return self._last[0]


def require_fsdp_support(ranks: ProcessGroup) -> None:
    """Refuse what cannot keep shares.

    Raises:
        UserError: there is one process, or no way to sum into shares.
    """
    if ranks.size == 1:
        raise UserError(
            "shard needs several processes",
            hint="start them with mlx.launch, or leave out shard",
        )
    try:
        mx.eval(ranks.reduce_scatter(mx.zeros((ranks.size, 1))))
    except RuntimeError as fault:
        raise UserError(
            f"this backend ({backend()}) cannot reduce-scatter, as shard must: {fault}",
            hint="use NCCL or JACCL, or leave out shard",
        ) from fault


@contextmanager
def _in_place(
    block: nn.Module, weights: dict[str, mx.array], prefix: str
) -> Iterator[None]:
    pairs = [(path.removeprefix(prefix), value) for path, value in weights.items()]
    before = block.trainable_parameters()
    block.update(tree_unflatten(pairs))
    try:
        yield
    finally:
        block.update(before)
