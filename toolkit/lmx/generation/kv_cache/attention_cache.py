"""Keys and values of one sequence, with rollback: all of them, or those of a window."""

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol, Self

import mlx.core as mx

WINDOW_SLACK = 64
"""Positions that a sliding-window cache keeps beyond its window, for rollback."""
BUFFER_STEP = 256
"""Positions by which the buffers grow."""


class Codec(Protocol):
    """How keys and values are stored. Codecs have no state.

    Attributes:
        bits, group_size: as for `mx.quantize`; `bits` is None without quantization.
    """

    bits: int | None
    group_size: int

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays to store of new keys and values [B, H, N, D]."""
        ...

    def decode(self, parts: Sequence[mx.array]) -> tuple:
        """The keys and values that mlx-lm's attention takes, from such arrays."""
        ...

    def name(self, kind: str) -> str:
        """The name of a kind of cache with this codec."""
        ...


class PlainCodec:
    """Keys and values in the dtype of the model."""

    bits = None
    group_size = 0

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays as they are."""
        return [keys, values]

    def decode(self, parts: Sequence[mx.array]) -> tuple:
        """Keys and values."""
        return parts[0], parts[1]

    def name(self, kind: str) -> str:
        """The kind as it is."""
        return kind


PLAIN_CODEC = PlainCodec()


def use_codec(cache: Any, codec: Codec) -> None:
    """Give a cache its codec."""
    cache.codec = codec
    if codec.bits:  # mlx-lm's attention looks for both
        cache.bits, cache.group_size = codec.bits, codec.group_size


def attention_mask(queries: mx.array, keys: mx.array, window: float) -> mx.array:
    """Whether a query attends to a key.

    Args:
        queries, keys: positions that broadcast to each other. The key of a negative
            position is no key, if there is a window.
        window: how many positions it attends to, with its own; inf = all.
    """
    mask = keys <= queries
    if window == inf:
        return mask
    return mask & (keys > mx.maximum(queries - window, -1))


class AttentionCache:
    """Keys and values of a layer with full or sliding-window attention.

    For windows it replaces mlx-lm's RotatingKVCache, which overwrites the oldest
    position in place. Past the window that cache cannot be trimmed, and speculative
    decoding with it gives wrong tokens without an error. Here the buffer is in temporal
    order, and moved from time to time.

    Args:
        codec: how they are stored.
        max_size: window size: the positions a token attends to, including itself.

    Attributes:
        keys, values: buffers [B, H, capacity, ...] as from the codec; None at first.
        offset: number of tokens.
        first: position of the first entry of the buffers.
    """

    def __init__(self, codec: Codec = PLAIN_CODEC, max_size: float = inf):
        use_codec(self, codec)
        self.max_size = max_size
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.first = 0
        # The entries that were last attended to.
        self._visible = slice(0, 0)

    def empty_copy(self) -> Self:
        """An empty cache of the same kind."""
        return type(self)(self.codec, self.max_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """Append N positions [B, H, N, D]; returns all that they may attend to."""
        count, new = keys.shape[2], self.codec.encode(keys, values)
        self._reserve(new)
        start = self.offset - self.first
        for buffer, part in zip(self.parts, new, strict=True):
            buffer[:, :, start : start + count] = part
        self.offset += count
        self._visible = slice(max(0, start - self.max_size + 1), start + count)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple:
        """The last result of `update_and_fetch`, for layers that share keys."""
        return self.codec.decode([part[:, :, self._visible] for part in self.parts])

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        window = window_size or self.max_size
        before = min(self.offset, self.max_size - 1)
        fits = before + length <= window
        if fits and not return_array:
            return None if length == 1 else "causal"
        keys = mx.arange(before + length)
        queries = mx.arange(before, before + length)[:, None]
        return attention_mask(queries, keys, inf if fits else window)

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
        return sum(part.nbytes for part in self.parts)

    @property
    def state(self) -> tuple:
        """Keys, values, offset and first position: enough to restore the cache."""
        return self.keys, self.values, self.offset, self.first

    @state.setter
    def state(self, state: tuple) -> None:
        self.keys, self.values, self.offset, self.first = state

    @property
    def name(self) -> str:
        """The kind of the cache. Entries of another kind mean other keys and values."""
        return self.codec.name("KVCache" if self.max_size == inf else "WindowCache")

    @property
    def parts(self) -> list[mx.array]:
        """All arrays of the keys, then those of the values."""
        return [] if self.keys is None else entries(self.keys, self.values)

    def _reserve(self, new: Sequence[mx.array]) -> None:
        """Make room for more positions, dropping those that left the window."""
        used, end, old = self.offset - self.first, new[0].shape[2], self.parts
        if old and used + end <= old[0].shape[2]:
            return
        drop = max(0, used - (self.max_size - 1 + WINDOW_SLACK))
        end += used - drop
        size = end + BUFFER_STEP
        if end < self.max_size:
            size = -(-end // BUFFER_STEP) * BUFFER_STEP
        buffers = []
        for index, part in enumerate(new):
            shape = (*part.shape[:2], size - (used - drop), part.shape[3])
            kept = [old[index][:, :, drop:used]] if old else []
            zeros = mx.zeros(shape, part.dtype)
            buffers.append(mx.concatenate([*kept, zeros], axis=2))
        self.keys, self.values = halves(buffers)
        self.first += drop


def entries(keys: Any, values: Any) -> list[mx.array]:
    """The arrays of keys, and then those of values."""
    if isinstance(keys, mx.array):
        return [keys, values]
    return [*keys, *values]


def halves(parts: Sequence[mx.array]) -> tuple:
    """The inverse of `entries`."""
    half = len(parts) // 2
    return (*parts,) if half == 1 else (tuple(parts[:half]), tuple(parts[half:]))
