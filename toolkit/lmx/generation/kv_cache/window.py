"""Sliding-window KV caches of one sequence that support rollback."""

from collections.abc import Sequence
from typing import Self

import mlx.core as mx

from .rotation import KeyRotation, quantized_entries, with_rotation

WINDOW_SLACK = 64
"""Positions that a sliding-window cache keeps beyond its window, for rollback."""
BUFFER_STEP = 256
"""Positions by which the buffer of a sliding-window cache grows."""


class WindowCache:
    """Sliding-window KV cache that supports rollback.

    It replaces mlx-lm's RotatingKVCache, which overwrites the oldest position in place.
    Past the window that cache cannot be trimmed, and speculative decoding with it gives
    wrong tokens without an error. Here the buffer is in temporal order and is moved
    from time to time.

    Args:
        max_size: window size: the positions a token attends to, including itself.

    Attributes:
        first: position of the first entry of the buffers.
    """

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self.first = 0
        # The entries that were last attended to.
        self._visible = slice(0, 0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append N positions [B, H, N, D]; returns all that they may attend to."""
        count, new = keys.shape[2], self._entries(keys, values)
        self._reserve(new)
        start = self.offset - self.first
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[..., start : start + count, :] = part
        self.offset += count
        self._visible = slice(max(0, start - self.max_size + 1), start + count)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The last result of `update_and_fetch`, for layers that share keys."""
        return self.keys[..., self._visible, :], self.values[..., self._visible, :]

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        window = window_size or self.max_size
        before = min(self.offset, self.max_size - 1)
        if before + length <= window and not return_array:
            return None if length == 1 else "causal"
        columns = mx.arange(before + length)
        rows = mx.arange(before, before + length)[:, None]
        return (columns <= rows) & (columns > rows - window)

    def can_trim(self, count: int) -> bool:
        """Whether the full window is still buffered after trimming `count` tokens."""
        return self.first <= max(0, self.offset - count - self.max_size + 1)

    def trim(self, count: int) -> int:
        """Remove the last tokens; returns the number removed."""
        count = min(count, self.offset)
        assert self.can_trim(count), f"cannot trim {count} tokens"
        self.offset -= count
        return count

    def size(self) -> int:
        """Positions that the next token may attend to."""
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        """Whether nothing was stored yet."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def state(self) -> tuple:
        """Keys, values, offset and first position: enough to restore the cache."""
        return self.keys, self.values, self.offset, self.first

    @state.setter
    def state(self, state: tuple) -> None:
        self.keys, self.values, self.offset, self.first = state

    @property
    def _buffers(self) -> Sequence[mx.array]:
        """All arrays of the keys, then those of the values."""
        return [] if self.keys is None else [self.keys, self.values]

    def _set(self, buffers: Sequence[mx.array]) -> None:
        self.keys, self.values = buffers

    def _entries(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        """What the buffers get for new keys and values."""
        return keys, values

    def _reserve(self, new: Sequence[mx.array]) -> None:
        """Make room for more positions, dropping those that left the window."""
        used, end = self.offset - self.first, new[0].shape[2]
        if self._buffers and used + end <= self._buffers[0].shape[2]:
            return
        drop = max(0, used - (self.max_size - 1 + WINDOW_SLACK))
        end += used - drop
        size = end + BUFFER_STEP
        if end < self.max_size:
            size = -(-end // BUFFER_STEP) * BUFFER_STEP
        buffers = self._buffers or [None] * len(new)
        self._set(
            [
                _resize(buffer, part, drop, used, size)
                for buffer, part in zip(buffers, new, strict=True)
            ]
        )
        self.first += drop


class RotatedWindowCache(WindowCache):
    """A sliding-window cache with rotated and quantized entries.

    Args:
        max_size: see `WindowCache`.
        rotation: of the layer.
        bits: as for `mx.quantize`. mlx-lm's attention reads them, and `group_size`.

    Attributes:
        keys, values: codes, scales and biases; None at first.
    """

    def __init__(self, max_size: int, rotation: KeyRotation, bits: int):
        super().__init__(max_size)
        self.rotation, self.bits = rotation, bits
        self.group_size = rotation.group_size

    def empty_copy(self) -> Self:
        """An empty cache of the same kind."""
        return type(self)(self.max_size, self.rotation, self.bits)

    def keys_and_values(self) -> tuple:
        """The last result of `update_and_fetch`, for layers that share keys."""
        keys, values = (
            tuple(part[..., self._visible, :] for part in parts)
            for parts in (self.keys, self.values)
        )
        return with_rotation(keys, self.rotation), values

    @property
    def name(self) -> str:
        """The kind of the cache; see `RotatedKVCache.name`."""
        return f"{type(self).__name__} of {self.bits} bits, {self.rotation.digest}"

    @property
    def _buffers(self) -> Sequence[mx.array]:
        return [*(self.keys or ()), *(self.values or ())]

    def _set(self, buffers: Sequence[mx.array]) -> None:
        self.keys, self.values = tuple(buffers[:3]), tuple(buffers[3:])

    def _entries(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        return quantized_entries(self, keys, values)


def _resize(
    buffer: mx.array | None, like: mx.array, start: int, end: int, size: int
) -> mx.array:
    """A buffer of `size` positions that begins with the old buffer's [start:end]."""
    batch, heads, _, width = like.shape
    old = [] if buffer is None else [buffer[..., start:end, :]]
    new = mx.zeros((batch, heads, size - (end - start), width), like.dtype)
    return mx.concatenate([*old, new], axis=2)
