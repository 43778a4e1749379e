"""The cache of one layer for all rows of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import mlx.core as mx

from .attention_cache import (
    PLAIN_CODEC,
    WINDOW_SLACK,
    attention_mask,
    entries,
    halves,
    use_codec,
)
from .length_classes import ByClass, by_class

STEP = 16
"""Positions by which short buffers grow; long ones grow by a thirty-second."""


@dataclass(frozen=True)
class LengthClass:
    """Rows of about equal length, which share buffers.

    Attributes:
        start: the first of these rows.
        lengths: processed tokens of every row.
    """

    start: int
    lengths: tuple[int, ...]

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + len(self.lengths)

    @property
    def longest(self) -> int:
        """The largest length."""
        return max(self.lengths)

    @property
    def common(self) -> int | None:
        """The length of all rows; None = they differ."""
        return self.lengths[0] if len({*self.lengths}) == 1 else None

    @cached_property
    def array(self) -> mx.array:
        """The lengths, int32 [B]."""
        return mx.array(self.lengths, mx.int32)

    @cached_property
    def indices(self) -> mx.array:
        """The numbers of the rows in the buffers, int32 [B, 1]."""
        return mx.arange(len(self.lengths), dtype=mx.int32)[:, None]

    def positions(self, count: int) -> mx.array:
        """Positions of the next `count` tokens of every row, int32 [B, count]."""
        if count not in self._positions:  # all layers write to them
            steps = mx.arange(count, dtype=mx.int32)
            self._positions[count] = self.array[:, None] + steps
        return self._positions[count]

    @cached_property
    def _positions(self) -> dict[int, mx.array]:
        return {}


class RowLengths:
    """The processed tokens of every row, shared by all layers.

    Attributes:
        sizes: the number of rows of every length class. Rows of a class follow each
            other.
        classes: the rows of every class.
        all: all rows.
    """

    def __init__(self):
        self.sizes: list[int] = []
        self.set([])

    @property
    def values(self) -> Sequence[int]:
        """The lengths [B]."""
        return self.all.lengths

    def set(self, values: Sequence[int]) -> None:
        """Set the lengths of all rows."""
        assert len(values) == sum(self.sizes)
        self.all, self.classes, start = LengthClass(0, tuple(values)), [], 0
        for size in self.sizes:
            self.classes.append(LengthClass(start, self.values[start : start + size]))
            start += size


class AttentionRows:
    """Keys and values with full or sliding-window attention.

    The buffers of a length class are [R, H, capacity, D] with R >= its rows; the rows
    in use come first. Those of a window are rings of positions, larger than the window
    by `WINDOW_SLACK`: so many can be rolled back, because what they overwrote had left
    the window.

    Args:
        lengths: shared by all layers.
        like: the cache of one sequence, of the same kind.
    """

    is_recurrent = False

    def __init__(self, lengths: RowLengths, like: Any):
        self.lengths = lengths
        use_codec(self, getattr(like, "codec", PLAIN_CODEC))
        # By class: all arrays of the keys, then those of the values.
        self.buffers: list[list[mx.array]] = []
        self._rows: list[int] = []
        self._written = 0
        self.max_size: float = getattr(like, "max_size", inf)  # the window
        self._size = self.max_size + WINDOW_SLACK  # the largest capacity

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: one for all rows, or int32 [B]."""
        rows = self.lengths.all
        start = rows.array if rows.common is None else rows.common
        return start + self._written if self._written else start

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for parts in self.buffers for buffer in parts)

    @property
    def keys(self) -> mx.array:
        """The buffer of the keys, which some models make wait for other arrays."""
        if len(self.buffers) > 1:
            raise AttributeError("several length classes have several buffers")
        return self.buffers[0][0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.buffers[0][0] = keys

    def empty(self) -> bool:
        """Whether nothing was stored yet."""
        return not any(self.buffers)

    def join(self, cache: Any, index: int) -> None:
        """Add the cache of one sequence as the last row of a class, or a new class."""
        if index == len(self._rows):
            self.buffers.append([])
            self._rows.append(0)
        row, self._rows[index] = self._rows[index], self._rows[index] + 1
        for buffer in self.buffers[index]:
            # A mask hides no NaN that another sequence left in a row.
            buffer[row : row + 1] = 0
        if cache.keys is None:
            return
        first, end = getattr(cache, "first", 0), cache.offset
        start = max(first, self._start(end))
        parts = [
            part[:, :, start - first : end - first]
            for part in entries(cache.keys, cache.values)
        ]
        self._reserve(index, parts, end)
        if end <= self._size:
            for buffer, part in zip(self.buffers[index], parts, strict=True):
                buffer[row : row + 1, :, start:end] = part
            return
        rows, slots = mx.array([[row]]), mx.arange(start, end)[None] % self._size
        for buffer, part in zip(self.buffers[index], parts, strict=True):
            buffer[rows, :, slots] = part.swapaxes(1, 2)

    def leave(self, place: int) -> None:
        """Remove a row; the last row of its class takes its place."""
        index, row = self._find(place)
        if self.buffers[index]:
            # Rows that came since the last pass have no place yet, and MLX would read
            # beyond the buffers.
            self._reserve(index, self.buffers[index], 0)
        self._rows[index] -= 1
        rows, parts = self._rows[index], self.buffers[index]
        if not rows:
            del self.buffers[index], self._rows[index]
            return
        for buffer in parts if row != rows else []:
            buffer[row] = buffer[rows]
        if parts and parts[0].shape[0] > rows + 1 + rows // 4:
            self.buffers[index] = [mx.contiguous(buffer[:rows]) for buffer in parts]

    def extract(self, place: int, cache: Any, length: int) -> None:
        """Fill an empty cache of one sequence with a row."""
        start = self._start(length)
        if length:
            index, row = self._find(place)
            # A slice: the prefix cache copies only what it does not have. But it keeps
            # windows, so theirs are copies.
            slots: Any = slice(0, length)
            if self.max_size < inf:
                slots = mx.arange(start, length) % self._size
            rows = [buffer[row : row + 1] for buffer in self.buffers[index]]
            cache.keys, cache.values = halves([each[:, :, slots] for each in rows])
        cache.offset, cache.first = length, start

    def begin(self, width: int, counts: Sequence[int]) -> None:
        """Start a forward pass over `width` positions."""
        self._written = 0

    def end(self) -> None:
        """End a forward pass: the lengths count its tokens."""
        self._written = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """Write N positions [B, H, N, D]; returns all that a row may attend to."""
        new = self.codec.encode(keys, values)
        count, classes = keys.shape[2], self.lengths.classes
        for index, rows in enumerate(classes):
            mine = new
            if len(classes) > 1:
                mine = [part[rows.start : rows.end] for part in new]
            self._reserve(index, mine, rows.longest + count)
            for buffer, part in zip(self.buffers[index], mine, strict=True):
                self._write(rows, buffer, part, count)
        self._written = count
        return self.keys_and_values()

    def keys_and_values(self) -> tuple:
        """The last result of `update_and_fetch`, for layers that share keys."""
        pairs = []
        for rows, parts in zip(self.lengths.classes, self.buffers, strict=True):
            size, end = len(rows.lengths), self._end(rows, self._written)
            pairs.append(self.codec.decode([part[:size, :, :end] for part in parts]))
        return by_class([k for k, _ in pairs]), by_class([v for _, v in pairs])

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> "mx.array | str | ByClass | None":
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        window, masks = window_size or self.max_size, []
        for rows in self.lengths.classes:
            fits = rows.longest + length <= window
            if rows.common is not None and fits and not return_array:
                masks.append(None if length == 1 else "causal")
            else:
                masks.append(self._mask(rows, length, window))
        return by_class(masks)

    def _mask(self, rows: LengthClass, length: int, window: float) -> mx.array:
        queries = rows.positions(length)[:, None, :, None]
        keys = mx.arange(self._end(rows, length), dtype=mx.int32)
        if rows.longest + length > self._size:
            # The position that was last written to every slot of the ring.
            newest = queries[:, :, -1:]
            keys = newest - (newest - keys) % self._size
        fits = rows.longest + length <= window
        return attention_mask(queries, keys, inf if fits else window)

    def _find(self, place: int) -> tuple[int, int]:
        """The class of a row, and its number there."""
        for index, size in enumerate(self._rows):
            if place < size:
                return index, place
            place -= size
        raise AssertionError("no such row")

    def _end(self, rows: LengthClass, count: int) -> int:
        """Positions of the buffers in use after `count` more tokens."""
        return min(rows.longest + count, self._size)

    def _start(self, length: int) -> int:
        """The first position that the next token of a row attends to."""
        return max(0, length - self.max_size + 1)

    def _write(
        self, rows: LengthClass, buffer: mx.array, new: mx.array, count: int
    ) -> None:
        if not new.size:
            return
        assert count <= WINDOW_SLACK or self._size == inf
        common, size = rows.common, len(rows.lengths)
        is_wrapped = rows.longest + count > self._size
        if common is not None and not is_wrapped:
            buffer[:size, :, common : common + count] = new
            return
        slots = rows.positions(count)
        slots = slots % self._size if is_wrapped else slots
        # The indexed axes come first in such an assignment.
        buffer[rows.indices, :, slots] = new.swapaxes(1, 2)

    def _reserve(self, index: int, like: Sequence[mx.array], positions: int) -> None:
        """Make room for all rows of a class with this many positions."""
        if not self.buffers[index]:
            self.buffers[index] = [
                mx.zeros((0, part.shape[1], 0, part.shape[3]), part.dtype)
                for part in like
            ]
        positions = min(positions, self._size)
        rows, _, capacity, _ = self.buffers[index][0].shape
        missing = self._rows[index] - rows
        # Not one by one, which would copy all rows each time.
        more_rows = max(missing, rows // 8) if missing > 0 else 0
        step = max(STEP, positions // 32)
        wanted = min(-(-positions // step) * step, self._size)
        more = wanted - capacity if positions > capacity else 0
        if more_rows or more:
            widths = [(0, more_rows), (0, 0), (0, more), (0, 0)]
            self.buffers[index] = [mx.pad(b, widths) for b in self.buffers[index]]


class RecurrentRows:
    """Recurrent states.

    Args:
        like: the cache of one sequence.

    Attributes:
        arrays: mlx-lm's ArraysCache [B, ...], which the model reads and writes.
    """

    is_recurrent = True

    def __init__(self, like: Any):
        self.arrays = type(like)(len(like.cache))
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.arrays.cache if state is not None)

    def join(self, cache: Any, place: int) -> None:
        """Add the state of one sequence at a place, before the rows there."""

        def joined(batch: mx.array | None, new: mx.array | None) -> mx.array | None:
            like = new if batch is None else batch
            if like is None:
                return None
            shape = like.shape[1:]
            if batch is None:
                batch = mx.zeros((self._rows, *shape), like.dtype)
            if new is None:
                new = mx.zeros((1, *shape), like.dtype)
            return mx.concatenate([batch[:place], new, batch[place:]])

        self.arrays.cache = [*map(joined, self.arrays.cache, cache.cache)]
        self._rows += 1

    def leave(self, place: int, last: int) -> None:
        """Remove a row; another one takes its place."""
        kept = [row for row in range(self._rows) if row != last]
        if place != last:
            kept[place] = last
        self._rows -= 1
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
