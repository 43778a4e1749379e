"""The cache of one layer for all rows of a batch."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .rotation import quantized_entries, with_rotation
from .window import WINDOW_SLACK

STEP = 64
"""Positions by which the buffers grow."""


class RowLengths:
    """The processed tokens of every row, shared by all layers.

    Attributes:
        values: the lengths [B].
        common: the length of all rows; None = they differ.
    """

    def __init__(self):
        self.set([])

    def set(self, values: Sequence[int]) -> None:
        """Set the lengths of all rows."""
        self.values = list(values)
        self.common = self.values[0] if len(set(values)) == 1 else None
        self._array: mx.array | None = None

    @property
    def array(self) -> mx.array:
        """The lengths, int32 [B]."""
        if self._array is None:
            self._array = mx.array(self.values, mx.int32)
        return self._array

    def positions(self, count: int) -> mx.array:
        """Positions of the next `count` tokens of every row, int32 [B, count]."""
        return self.array[:, None] + mx.arange(count, dtype=mx.int32)


class FullRows:
    """Keys and values with full attention, plain or quantized.

    Buffers are [R, H, capacity, D] with R >= B; the rows in use come first.

    Args:
        lengths: shared by all layers.
        like: the cache of one sequence, of the same kind.
    """

    is_recurrent = False

    def __init__(self, lengths: RowLengths, like: Any):
        self.lengths = lengths
        if hasattr(like, "bits"):  # mlx-lm's attention reads both
            self.group_size, self.bits = like.group_size, like.bits
            self.rotation = like.rotation
        # All arrays of the keys, then those of the values: one each, or codes, scales
        # and biases.
        self.buffers: list[mx.array] = []
        self._rows = 0
        self._written = 0

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: one for all rows, or int32 [B]."""
        common = self.lengths.common
        return (self.lengths.array if common is None else common) + self._written

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def keys(self) -> mx.array:
        """The buffer of the keys, which some models make wait for other arrays."""
        return self.buffers[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.buffers[0] = keys

    def empty(self) -> bool:
        """Whether nothing was stored yet."""
        return not self.buffers

    def join(self, cache: Any) -> None:
        """Add the cache of one sequence as the last row."""
        self._rows += 1
        if cache.keys is None:
            return
        parts = [*_parts(cache.keys), *_parts(cache.values)]
        if self._rows == 1:
            self.buffers = [mx.contiguous(part) for part in parts]
            return
        row, end = self._rows - 1, cache.offset
        self._reserve(parts, end)
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[row : row + 1, :, :end] = part[:, :, :end]

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self._rows -= 1
        if not self._rows:
            self.buffers = []
        elif row != self._rows:
            for buffer in self.buffers:
                buffer[row] = buffer[self._rows]

    def extract(self, row: int, cache: Any, length: int) -> None:
        """Copy a row to an empty cache of one sequence."""
        if length:
            cache.keys, cache.values = self._joined(
                [mx.contiguous(b[row : row + 1, :, :length]) for b in self.buffers]
            )
        cache.offset = length

    def begin(self, width: int, counts: Sequence[int]) -> None:
        """Start a forward pass over `width` positions."""
        self._written = 0

    def end(self) -> None:
        """End a forward pass: the lengths count its tokens."""
        self._written = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """Write N positions [B, H, N, D]; returns all that a row may attend to."""
        is_plain = not hasattr(self, "bits")
        new = [keys, values] if is_plain else quantized_entries(self, keys, values)
        count = keys.shape[2]
        self._reserve(new, max(self.lengths.values) + count)
        for buffer, part in zip(self.buffers, new, strict=True):
            self._write(buffer, part, count)
        self._written = count
        return self.keys_and_values()

    def keys_and_values(self) -> tuple:
        """The last result of `update_and_fetch`, for layers that share keys."""
        end = self._end(self._written)
        parts = [buffer[: self._rows, :, :end] for buffer in self.buffers]
        keys, values = self._joined(parts)
        if hasattr(self, "bits"):
            keys = with_rotation(keys, self.rotation)
        return keys, values

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        end = self._end(length)
        fits = window_size is None or end <= window_size
        if self.lengths.common is not None and fits and not return_array:
            return None if length == 1 else "causal"
        queries = self.lengths.positions(length)[:, None, :, None]
        keys = mx.arange(end, dtype=mx.int32)
        mask = keys <= queries
        return mask if fits else mask & (keys > queries - window_size)

    def _end(self, count: int) -> int:
        """Positions of the buffers in use after `count` more tokens."""
        return max(self.lengths.values) + count

    def _write(self, buffer: mx.array, new: mx.array, count: int) -> None:
        if not new.size:
            return
        common = self.lengths.common
        if common is not None:
            buffer[: self._rows, :, common : common + count] = new
            return
        rows = mx.arange(self._rows)[:, None]
        # The indexed axes come first in such an assignment.
        buffer[rows, :, self.lengths.positions(count)] = new.swapaxes(1, 2)

    def _joined(self, parts: Sequence[mx.array]) -> tuple:
        """Keys and values from their arrays."""
        half = len(parts) // 2
        return (*parts,) if half == 1 else (tuple(parts[:half]), tuple(parts[half:]))

    def _reserve(self, like: Sequence[mx.array], positions: int) -> None:
        """Make room for all rows with this many positions."""
        if not self.buffers:
            self.buffers = [
                mx.zeros((1, part.shape[1], 0, part.shape[3]), part.dtype)
                for part in like
            ]
        rows, _, capacity, _ = self.buffers[0].shape
        more_rows = max(0, max(2 * rows, self._rows) - rows) * (self._rows > rows)
        more = -(-max(0, positions - capacity) // STEP) * STEP
        if more_rows or more:
            widths = [(0, more_rows), (0, 0), (0, more), (0, 0)]
            self.buffers = [mx.pad(buffer, widths) for buffer in self.buffers]


class WindowRows(FullRows):
    """Keys and values of a sliding window, as a ring of positions.

    The ring is larger than the window by `WINDOW_SLACK` positions: so many can be
    rolled back, because what they overwrote had left the window.

    Args: see `FullRows`.
    """

    def __init__(self, lengths: RowLengths, like: Any):
        super().__init__(lengths, like)
        self.max_size = like.max_size
        self._size = like.max_size + WINDOW_SLACK

    def join(self, cache: Any) -> None:
        """Add the cache of one sequence as the last row."""
        self._rows += 1
        if cache.keys is None:
            return
        end = cache.offset
        start = max(cache.first, end - self.max_size + 1, 0)
        parts = [
            part[:, :, start - cache.first : end - cache.first]
            for part in (cache.keys, cache.values)
        ]
        self._reserve(parts, min(end, self._size))
        row = mx.array([[self._rows - 1]])
        slots = mx.arange(start, end)[None] % self._size
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer[row, :, slots] = part.swapaxes(1, 2)

    def extract(self, row: int, cache: Any, length: int) -> None:
        """Copy a row to an empty cache of one sequence."""
        start = max(0, length - self.max_size + 1)
        if length:
            slots = mx.arange(start, length) % self._size
            cache.keys, cache.values = (
                b[row : row + 1][:, :, slots] for b in self.buffers
            )
        cache.offset, cache.first = length, start

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        assert length <= WINDOW_SLACK
        last = max(self.lengths.values) + length
        window = window_size or self.max_size
        if self.lengths.common is not None and last <= window and not return_array:
            return None if length == 1 else "causal"
        queries = self.lengths.positions(length)[:, None, :, None]
        # The last position that was written to every slot of the ring.
        newest = queries[:, :, -1:]
        slots = mx.arange(self._end(length), dtype=mx.int32)
        keys = newest - (newest - slots) % self._size
        return (keys >= 0) & (keys <= queries) & (keys > queries - window)

    def _end(self, count: int) -> int:
        return min(super()._end(count), self._size)

    def _write(self, buffer: mx.array, new: mx.array, count: int) -> None:
        rows = mx.arange(self._rows)[:, None]
        slots = self.lengths.positions(count) % self._size
        buffer[rows, :, slots] = new.swapaxes(1, 2)

    def _reserve(self, like: Sequence[mx.array], positions: int) -> None:
        super()._reserve(like, min(positions, self._size))


class RecurrentRows:
    """Recurrent states.

    Args: see `FullRows`.

    Attributes:
        arrays: mlx-lm's ArraysCache [B, ...], which the model reads and writes.
    """

    is_recurrent = True

    def __init__(self, lengths: RowLengths, like: Any):
        self.arrays = type(like)(len(like.cache))
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.arrays.cache if state is not None)

    def join(self, cache: Any) -> None:
        """Add the state of one sequence as the last row."""

        def joined(batch: mx.array | None, new: mx.array | None) -> mx.array | None:
            like = new if batch is None else batch
            if like is None:
                return None
            shape = like.shape[1:]
            if batch is None:
                batch = mx.zeros((self._rows, *shape), like.dtype)
            if new is None:
                new = mx.zeros((1, *shape), like.dtype)
            return mx.concatenate([batch, new])

        self.arrays.cache = [*map(joined, self.arrays.cache, cache.cache)]
        self._rows += 1

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self._rows -= 1
        kept = [*range(self._rows)]
        if row < self._rows:
            kept[row] = self._rows
        indices = mx.array(kept, mx.int32)
        self.arrays.cache = [
            None if state is None or not kept else state[indices]
            for state in self.arrays.cache
        ]

    def extract(self, row: int, cache: Any, length: int) -> None:
        """Copy a row to an empty cache of one sequence."""
        if length:
            rows = [state[row : row + 1] for state in self.arrays.cache]
            cache.cache = [mx.contiguous(state) for state in rows]

    def begin(self, width: int, counts: Sequence[int]) -> None:
        """Start a forward pass over `width` positions, of which some are padding."""
        is_ragged = any(count != width for count in counts)
        self.arrays.lengths = mx.array(counts, mx.int32) if is_ragged else None

    def end(self) -> None:
        """End a forward pass."""
        self.arrays.lengths = None


def _parts(values: mx.array | tuple) -> Sequence[mx.array]:
    return [values] if isinstance(values, mx.array) else values
