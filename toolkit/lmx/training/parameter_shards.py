"""Trained parameters of which every process of a group holds a part."""

import mlx.core as mx

from ..run.distributed import ProcessGroup


class ParameterShards:
    """Which parameters are divided, and along which axis; others are replicated.

    All ranks must call all methods that communicate, in the same order.

    Args:
        axes: the axis of every divided parameter, by path; empty = none is.
        ranks: the processes that hold the parameters together.
    """

    def __init__(self, axes: dict[str, int], ranks: ProcessGroup):
        self._axes = axes
        self._ranks = ranks

    def __contains__(self, path: str) -> bool:
        return path in self._axes

    def __bool__(self) -> bool:
        return bool(self._axes)

    def shard(self, path: str, value: mx.array) -> mx.array:
        """This rank's part of a full parameter, or of a moment or its scales."""
        if path not in self:
            return value
        axis = self._axes[path]
        parts = mx.split(value, self._ranks.size, axis=axis)
        # A copy, because a slice would keep the full array alive.
        return mx.contiguous(parts[self._ranks.rank])

    def unshard(self, path: str, value: mx.array) -> mx.array:
        """The full array of a part, gathered from all ranks and computed."""
        if path in self:
            axis = self._axes[path]
            rows = mx.contiguous(value.moveaxis(axis, 0))
            value = mx.contiguous(self._ranks.all_gather(rows).moveaxis(0, axis))
        mx.eval(value)
        return value

    def full_shape(self, path: str, value: mx.array) -> tuple[int, ...]:
        """The shape of the full array of a part."""
        shape = list(value.shape)
        if path in self:
            shape[self._axes[path]] *= self._ranks.size
        return tuple(shape)

    def grad_norm(self, gradients: dict[str, mx.array]) -> mx.array:
        """The joint norm of all gradients, over the parts of all ranks."""
        squares = {path: mx.square(value).sum() for path, value in gradients.items()}
        replicated = [value for path, value in squares.items() if path not in self]
        if not self:
            return mx.sqrt(sum(replicated))
        divided = sum(value for path, value in squares.items() if path in self)
        # After the sums of the replicated gradients: one collective at a time.
        [divided] = self._ranks.all_sum(mx.depends([divided], replicated))
        return mx.sqrt(divided + sum(replicated))
