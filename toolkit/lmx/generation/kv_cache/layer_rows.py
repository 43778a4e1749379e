"""The cache of one layer for all rows of a batch. One sequence is one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import mlx.core as mx

from .codec import PLAIN_CODEC, Codec
from .eviction import ObservedQueries
from .length_classes import ByClass, by_class

STEP = 16
"""Positions by which short buffers grow; long ones grow by a thirty-second."""
WINDOW_SLACK = 64
"""Positions that the ring of a window has beside the window, for rollback."""


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

    @cached_property
    def longest(self) -> int:
        """The largest length."""
        return max(self.lengths)

    @cached_property
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

    Args:
        count: rows without tokens at the start, in one class.

    Attributes:
        sizes: the number of rows of every length class. Rows of a class follow each
            other.
        classes: the rows of every class.
        all: all rows.
    """

    def __init__(self, count: int = 0):
        self.sizes: list[int] = [count] if count else []
        self.set([0] * count)

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
    the window. (mlx-lm's RotatingKVCache cannot be trimmed past the window, and
    speculative decoding with it gives wrong tokens without an error.)

    Args:
        lengths: shared by all layers, which have its rows.
        codec: how keys and values are stored.
        max_size: window size: the positions a token attends to, with itself; inf = all.
        keep: first positions that stay in the window (attention sinks, arXiv
            2309.17453). They have the first slots, and the ring has the others.
        step: positions by which the buffers grow at least.

    Attributes:
        first: the first position that is stored, if there is one row; `keep` aside.
        observed: the queries that choose what is kept of a prompt; see `eviction`.
    """

    is_recurrent = False

    def __init__(
        self,
        lengths: RowLengths,
        codec: Codec = PLAIN_CODEC,
        max_size: float = inf,
        *,
        keep: int = 0,
        step: int = STEP,
    ):
        self.lengths, self.codec = lengths, codec
        if codec.bits:  # mlx-lm's attention looks for both
            self.bits, self.group_size = codec.bits, codec.group_size
        # By class: all arrays of the keys, then those of the values.
        self.buffers: list[list[mx.array]] = [[] for _ in lengths.sizes]
        self.first = 0
        self.observed: ObservedQueries | None = None
        self._rows = [*lengths.sizes]
        self._set_window(max_size, keep)
        self._step = step
        # The positions that this pass has written, and the lengths before it.
        self._count, self._before = 0, lengths.all
        # What the positions of a long pass attend to.
        self._long: list[mx.array] = []

    @property
    def name(self) -> str:
        """The kind of the cache. Entries of another kind mean other keys and values."""
        kind = "KVCache" if self.max_size == inf else "WindowCache"
        if self.keep:  # that is of the user, and not of the model
            kind += f" of {self.max_size} positions"
        return self.codec.name(kind)

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: one for all rows, or int32 [B]."""
        rows, written = self.lengths.all, self._written
        start = rows.array if rows.common is None else rows.common
        return start + written if written else start

    @property
    def _written(self) -> int:
        """Positions that were written since the lengths were set."""
        return self._count if self._before is self.lengths.all else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for parts in self.buffers for buffer in parts)

    @property
    def position_bytes(self) -> float:
        """Bytes of a position of a row, when something is stored."""
        return sum(p.nbytes / (p.shape[0] * p.shape[2]) for p in self._only())

    @property
    def state(self) -> list:
        """All arrays."""
        return [*self.buffers, [self.observed and self.observed.queries]]

    @property
    def keys(self) -> mx.array:
        """The buffer of the keys, which some models make wait for other arrays."""
        return self._only()[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._only()[0] = keys

    @property
    def values(self) -> mx.array:
        """The buffer of the values."""
        return self._only()[-1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._only()[-1] = values

    def _only(self) -> list[mx.array]:
        if len(self.buffers) > 1:
            raise AttributeError("several length classes have several buffers")
        return self.buffers[0]

    def empty(self) -> bool:
        """Whether nothing was stored yet."""
        return not any(self.buffers)

    # Rows

    def join(self, one: "AttentionRows", index: int) -> None:
        """Add a cache of one row as the last row of a class, or a new class."""
        if index == len(self._rows):
            self.buffers.append([])
            self._rows.append(0)
        row, self._rows[index] = self._rows[index], self._rows[index] + 1
        for buffer in self.buffers[index]:
            # A mask hides no NaN that another sequence left in a row.
            buffer[row : row + 1] = 0
        if one.empty():
            return
        end = min(one.lengths.all.longest, self._size)
        self._reserve(index, one.buffers[0], end)
        for buffer, part in zip(self.buffers[index], one.buffers[0], strict=True):
            buffer[row : row + 1, :, :end] = part[:, :, :end]

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

    def extract(self, place: int, one: "AttentionRows", length: int) -> None:
        """Fill an empty cache of one row with a row."""
        if length:
            index, row = self._find(place)
            end = min(length, self._size)
            # Slices: the prefix cache copies only what it does not have.
            one.buffers = [[b[row : row + 1, :, :end] for b in self.buffers[index]]]
        one.first = self._start(length)

    def _find(self, place: int) -> tuple[int, int]:
        """The class of a row, and its number there."""
        for index, size in enumerate(self._rows):
            if place < size:
                return index, place
            place -= size
        raise AssertionError("no such row")

    # One row

    def entries(self, start: int, end: int) -> list[mx.array]:
        """Copies of stored positions of the only row, [1, H, n, ...] each.

        Those before `start` that stay in the window come first.
        """
        # Not slices: those share the buffers, and keep them in memory.
        slots = self._slots(self._from(start, end), end)
        return [mx.take(part, slots, axis=2) for part in self._only()]

    def restore(self, entries: Sequence[mx.array], first: int, length: int) -> None:
        """Fill the only row, which is empty, with `entries(first, length)`."""
        self.first = first
        self._reserve(0, entries, length)
        self._write_entries(entries, first, length)

    def become_window(self, max_size: int, keep: int) -> None:
        """Let the only row, which has all positions, keep those of a window.

        With observed queries, the positions that they attend to most have the places of
        the last ones. The one with the least attention leaves the window first.
        """
        length, parts = self.lengths.all.longest, self._only()
        self._set_window(max_size, keep)
        first = self._start(length)
        kept = self._from(first, length)[None, None]
        if first and self.observed:
            keys = self.codec.keys([part[:, :, :length] for part in parts])
            kept = self.observed.most_attended(keys, kept.size, keep)
        parts = [mx.take_along_axis(part, kept[..., None], axis=2) for part in parts]
        self.buffers, self.observed = [[]], None
        if parts:
            self.restore(parts, first, length)

    def can_trim(self, count: int) -> bool:
        """Whether the only row has a full window without its last `count` tokens."""
        return self.first <= self._start(self.lengths.all.longest - count)

    # Forward passes

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """Write N positions [B, H, N, D]; returns all that a row may attend to."""
        new, written = self.codec.encode(keys, values), self._written
        count, classes = keys.shape[2], self.lengths.classes
        ahead, self._long = written + count, []
        if self._is_long(count):
            self._write_long(new, written)
        for index, rows in enumerate([] if self._long else classes):
            mine = new
            if len(classes) > 1:
                mine = [part[rows.start : rows.end] for part in new]
            self._reserve(index, mine, rows.longest + ahead)
            for buffer, part in zip(self.buffers[index], mine, strict=True):
                self._write(rows, buffer, part, written)
        self._count, self._before = ahead, self.lengths.all
        end = self.lengths.all.longest + ahead
        if end > self._size:
            self.first = max(self.first, end - self._ring)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple:
        """The last result of `update_and_fetch`, for layers that share keys."""
        if self._long:
            return self.codec.decode(self._long)
        pairs = []
        for rows, parts in zip(self.lengths.classes, self.buffers, strict=True):
            size, end = len(rows.lengths), self._end(rows, self._written)
            pairs.append(self.codec.decode([part[:size, :, :end] for part in parts]))
        return by_class([k for k, _ in pairs]), by_class([v for _, v in pairs])

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> "mx.array | str | ByClass | None":
        """Mask of the next `length` tokens over the result of `update_and_fetch`."""
        window, masks = window_size or inf, []
        ahead = self._written + length
        for rows in self.lengths.classes:
            fits = rows.longest + ahead <= min(window, self.max_size)
            # As from mlx-lm, a token that sees all positions has no array either.
            needs_array = return_array and (length > 1 or len(self.lengths.values) > 1)
            if rows.common is not None and fits and not needs_array:
                masks.append(None if length == 1 else "causal")
            else:
                masks.append(self._mask(rows, length, window))
        return by_class(masks)

    def _mask(self, rows: LengthClass, length: int, window: float) -> mx.array:
        ahead = self._written + length
        queries = rows.positions(ahead)[:, None, -length:, None]
        start, end = rows.longest + self._written, rows.longest + ahead
        if self._is_long(length):
            keys = self._from(self._start(start), end)
            stays = keys < self.keep
        else:
            keys = mx.arange(self._end(rows, ahead), dtype=mx.int32)
            stays = keys < self.keep
            if end > self._size:
                # The position that was last written to every slot of the ring.
                newest = queries[:, :, -1:]
                written = newest - (newest - keys) % self._ring
                keys = mx.where(stays, keys, written) if self.keep else written
        mask = keys <= queries
        if end > self.max_size:
            # Slots of the ring that have no position yet are less than `keep`.
            oldest = mx.maximum(queries - self.max_size, -1) + self.keep
            in_ring = keys > oldest
            mask = mask & (in_ring | stays if self.keep else in_ring)
        if end > window and (window < self.max_size or self.keep):
            mask = mask & (keys > queries - window)  # that of the model
        return mask[0, 0] if len(self.lengths.values) == 1 else mask

    def _end(self, rows: LengthClass, count: int) -> int:
        """Positions of the buffers in use after `count` more tokens."""
        return min(rows.longest + count, self._size)

    def _set_window(self, max_size: float, keep: int) -> None:
        self.max_size, self.keep = max_size, keep
        self._size = max_size + WINDOW_SLACK  # the largest capacity

    @property
    def _ring(self) -> float:
        """Slots of the positions that leave the window."""
        return self._size - self.keep

    def _start(self, length: int) -> int:
        """The first position that the next token of a row attends to, `keep` aside."""
        start = length - self.max_size + 1
        return start + self.keep if start > 0 else 0

    def _from(self, start: int, end: int) -> mx.array:
        """Positions from `start` on, behind those before it that stay; int32."""
        positions = mx.arange(start, end, dtype=mx.int32)
        if stay := min(self.keep, start):
            positions = mx.concatenate([mx.arange(stay, dtype=mx.int32), positions])
        return positions

    def _slots(self, positions: mx.array, end: int) -> mx.array:
        """Where positions before `end` are in the buffers."""
        if end <= self._size:
            return positions
        slots = (positions - self.keep) % self._ring + self.keep
        return mx.where(positions < self.keep, positions, slots) if self.keep else slots

    def _write(
        self, rows: LengthClass, buffer: mx.array, new: mx.array, written: int
    ) -> None:
        """Write positions behind those that this pass has written."""
        if not new.size:
            return
        count, start = new.shape[2], rows.longest + written
        slot = start
        if start >= self._size:
            slot = (start - self.keep) % self._ring + self.keep
        if rows.common is not None and slot + count <= self._size:
            buffer[: len(rows.lengths), :, slot : slot + count] = new
            return
        positions = rows.positions(written + count)[:, written:]
        slots = self._slots(positions, start + count)
        # The indexed axes come first in such an assignment.
        buffer[rows.indices, :, slots] = new.swapaxes(1, 2)

    def _is_long(self, count: int) -> bool:
        """Whether so many positions would overwrite what the first of them need."""
        return count > WINDOW_SLACK and self.max_size < inf

    def _write_long(self, new: Sequence[mx.array], written: int) -> None:
        """Write the positions of a long pass, of the only row."""
        start = self.lengths.all.longest + written
        assert len(self.lengths.values) == 1, "several rows take few positions"
        self._long, end = [*new], start + new[0].shape[2]
        first = self._start(start)
        if start:
            old = self.entries(first, start)
            self._long = [
                mx.concatenate(pair, axis=2) for pair in zip(old, new, strict=True)
            ]
        self._reserve(0, new, end)
        parts = self._long
        if (count := parts[0].shape[2]) > self._size:
            first, kept = end - self._ring, self._from(count - self._ring, count)
            parts = [mx.take(part, kept, axis=2) for part in parts]
        self._write_entries(parts, first, end)

    def _write_entries(self, parts: Sequence[mx.array], start: int, end: int) -> None:
        """Write the positions `_from(start, end)` of the only row."""
        slots: Any = slice(start, end)
        if end > self._size or min(self.keep, start):
            slots = self._slots(self._from(start, end), end)
        for buffer, part in zip(self._only(), parts, strict=True):
            buffer[:, :, slots] = part

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
        step = max(self._step, positions // 32)
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
