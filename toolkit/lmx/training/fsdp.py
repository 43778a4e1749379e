"""Fully sharded data parallelism: every rank holds a shard of the trained parameters.

As in `mlx.nn.fully_shard` (ZeRO stage 3, arXiv 1910.02054), the parameters of a block
are all-gathered when it runs, and its gradients are reduce-scattered.
"""

from collections.abc import Callable
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..interfaces import Communicator, WeightTransform
from ..launcher import backend
from ..models.dtypes import forward_weight
from ..models.hooks import TransformerBlocks


class ShardedParameters(WeightTransform):
    """Which parameters are sharded along their first axis, and their collectives.

    Parameters whose first axis is not divisible by the number of ranks are replicated.
    All ranks must call all methods that communicate, in the same order.

    Args:
        parameters: full parameters of the model by path; empty = nothing is sharded.
        stored_dtypes: dtypes of the checkpoint, by path.
        blocks: each one is gathered by itself when it runs. All other parameters stay
            gathered from the start of the forward pass to the end of the backward pass.
    """

    def __init__(
        self,
        parameters: dict[str, mx.array],
        ranks: Communicator,
        *,
        stored_dtypes: dict[str, mx.Dtype],
        blocks: TransformerBlocks | None,
    ):
        self._ranks = ranks
        self._stored_dtypes, self._blocks = stored_dtypes, blocks
        self._shapes = {
            path: value.shape
            for path, value in parameters.items()
            if value.ndim and value.shape[0] % ranks.size == 0
        }
        # The result of the last collective, and the inputs of the previous block.
        self._last: list[mx.array] = []
        self._previous_inputs: list[mx.array] = []

    def __contains__(self, path: str) -> bool:
        return path in self._shapes

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def shard(self, path: str, value: mx.array) -> mx.array:
        """This rank's shard of a full parameter, or of a moment or its scales."""
        if path not in self:
            return value
        # A copy, because a slice would keep the full array alive.
        return mx.contiguous(mx.split(value, self._ranks.size)[self._ranks.rank])

    def unshard(self, path: str, value: mx.array) -> mx.array:
        """The full array of a shard, gathered from all ranks and computed."""
        if path in self:
            value = self._ranks.all_gather(value)
        mx.eval(value)
        return value

    def full_shape(self, path: str, value: mx.array) -> tuple[int, ...]:
        """The shape of the full array of a shard."""
        if path not in self:
            return value.shape
        return (value.shape[0] * self._ranks.size, *value.shape[1:])

    def grad_norm(self, gradients: dict[str, mx.array]) -> mx.array:
        """The joint norm of all gradients, over the shards of all ranks."""
        squares = {path: mx.square(value).sum() for path, value in gradients.items()}
        replicated = [value for path, value in squares.items() if path not in self]
        if not self:
            return mx.sqrt(sum(replicated))
        sharded = sum(value for path, value in squares.items() if path in self)
        # After the sums of the replicated gradients: one collective at a time.
        [sharded] = self._ranks.all_sum(mx.depends([sharded], replicated))
        return mx.sqrt(sharded + sum(replicated))

    def all_reduce(
        self, scalars: list[mx.array], gradients: dict[str, mx.array]
    ) -> tuple[list[mx.array], dict[str, mx.array]]:
        """Sums of scalars and gradients over all ranks; shards are summed already."""
        sharded = {path: value for path, value in gradients.items() if path in self}
        replicated = {p: value for p, value in gradients.items() if p not in self}
        # After all collectives of the backward pass.
        if sharded:
            scalars = mx.depends(scalars, list(sharded.values()))
        sums = self._ranks.all_sum([*scalars, *replicated.values()])
        count = len(scalars)
        return sums[:count], sharded | dict(zip(replicated, sums[count:], strict=True))

    def forward_weights(
        self, parameters: dict[str, mx.array], compute: mx.Dtype
    ) -> dict[str, mx.array]:
        """The model's weights: full in the compute dtype, except the shards of blocks.

        The shards of blocks stay float32, so that their gradients are float32. They are
        cast when they are gathered.
        """
        self._last, self._previous_inputs = [], []
        self._compute_dtype = compute
        weights = {
            path: value if path in self else self._forward_weight(path, value)
            for path, value in parameters.items()
        }
        prefix = self._blocks.prefix if self._blocks else None
        outside = [p for p in self._shapes if not (prefix and p.startswith(prefix))]
        return weights | self._gather({path: parameters[path] for path in outside})

    def gathered_forward(self, number: int, block: nn.Module) -> Callable:
        """The forward pass of a block, which gathers the block's shards first."""
        if not self:
            return block
        prefix = f"{self._blocks.prefix}{number}."

        def forward(*args, **kwargs):
            flat = tree_flatten([args, kwargs])
            arrays = [leaf for _, leaf in flat if isinstance(leaf, mx.array)]
            trained = block.trainable_parameters()
            shards = {
                prefix + path: value
                for path, value in tree_flatten(trained)
                if prefix + path in self
            }
            # Not before the previous block starts, or all blocks would be in memory at
            # once; not after it ends, so that communication overlaps computation.
            full = self._gather(shards, self._previous_inputs)
            self._previous_inputs = [mx.stop_gradient(array) for array in arrays]
            weights = [(path.removeprefix(prefix), v) for path, v in full.items()]
            block.update(tree_unflatten(weights))
            try:
                return block(*args, **kwargs)
            finally:
                block.update(trained)

        return forward

    def _gather(
        self, shards: dict[str, mx.array], after: list[mx.array] | None = None
    ) -> dict[str, mx.array]:
        """Full parameters in the compute dtype, all of them in one collective."""
        if not shards:
            return {}
        size, paths = self._ranks.size, [*shards]
        ends = list(accumulate(value.size for value in shards.values()))[:-1]
        shapes = [self._shapes[path] for path in shards]

        @mx.custom_function
        def gather(shards):
            rows = map(self._forward_weight, paths, shards)
            flat = mx.concatenate([v.reshape(1, -1) for v in rows], axis=1)
            full = self._in_order(self._ranks.all_gather, flat, after or [])
            parts = mx.split(full, ends, axis=1)
            return [v.reshape(shape) for v, shape in zip(parts, shapes, strict=True)]

        @gather.vjp
        def _(shards, cotangents, _):
            rows = [v.astype(mx.float32).reshape(size, -1) for v in cotangents]
            flat = mx.concatenate(rows, axis=1)
            local = self._in_order(self._ranks.reduce_scatter, flat, [])
            parts = mx.split(local, ends, axis=1)
            return [v.reshape(s.shape) for v, s in zip(parts, shards, strict=True)]

        return dict(zip(shards, gather(list(shards.values())), strict=True))

    def _forward_weight(self, path: str, master: mx.array) -> mx.array:
        return forward_weight(master, self._stored_dtypes[path], self._compute_dtype)

    def _in_order(
        self, collective: Callable, value: mx.array, after: list[mx.array]
    ) -> mx.array:
        # One collective after the other, in the same order on all ranks.
        [value] = mx.depends([value], [*self._last, *after])
        self._last = [collective(value)]
        return self._last[0]


def require_fsdp_support(ranks: Communicator) -> None:
    """Refuse a launch that cannot train with FSDP.

    Raises:
        UserError: there is one process, or the backend has no reduce-scatter.
    """
    if ranks.size == 1:
        raise UserError(
            "fsdp needs several processes",
            hint="start them with mlx.launch, or remove fsdp",
        )
    try:
        mx.eval(ranks.reduce_scatter(mx.zeros((ranks.size, 1))))
    except RuntimeError as fault:
        raise UserError(
            f"this backend ({backend()}) has no reduce-scatter for fsdp: {fault}",
            hint="use NCCL or JACCL, or remove fsdp",
        ) from fault
