"""The cache of sliding-window attention that can take tokens back."""

import mlx.core as mx

SLACK = 64
"""Positions before the window that are kept, so that as many can be taken back."""
STEP = 256


class WindowCache:
    """Keys and values of the last `max_size` positions, and of some before them.

    In the place of mlx-lm's RotatingKVCache, which overwrites the oldest position as it
    goes, so that past the window nothing can be undone (and speculation goes wrong
    without a word). The buffer keeps the order of time and is moved on now and then.

    Args:
        max_size: positions that a token sees, itself among them.
    """

    def __init__(self, max_size: int):
        self.max_size = max_size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        # The position of the buffer's first entry, and the entries seen last.
        self._first = 0
        self._seen = slice(0, 0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append [B, H, N, D]; all that the N tokens may see, in the order of time."""
        count = keys.shape[2]
        self._make_room(keys, values)
        start = self.offset - self._first
        self.keys[..., start : start + count, :] = keys
        self.values[..., start : start + count, :] = values
        self.offset += count
        self._seen = slice(max(0, start - self.max_size + 1), start + count)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned; layers may share the keys of another."""
        return self.keys[..., self._seen, :], self.values[..., self._seen, :]

    def make_mask(
        self, length: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """What the next `length` tokens see of what `update_and_fetch` will return."""
        window = window_size or self.max_size
        # mlx-lm's plamo3 makes its caches one position too small.
        self.max_size = max(self.max_size, window)
        before = min(self.offset, self.max_size - 1)
        if before + length <= window and not return_array:
            return None if length == 1 else "causal"
        columns = mx.arange(before + length)
        rows = mx.arange(before, before + length)[:, None]
        return (columns <= rows) & (columns > rows - window)

    def is_trimmable(self) -> bool:
        """Always, for the last `SLACK` tokens."""
        return True

    def can_trim(self, count: int) -> bool:
        """Whether what the next token sees is all here, `count` tokens taken back."""
        return self._first <= max(0, self.offset - count - self.max_size + 1)

    def trim(self, count: int) -> int:
        """Take back the last tokens; how many those were."""
        count = min(count, self.offset)
        assert self.can_trim(count), f"{count} tokens cannot be taken back"
        self.offset -= count
        return count

    def size(self) -> int:
        """Positions that the next token may see."""
        return min(self.offset, self.max_size)

    def empty(self) -> bool:
        """Whether nothing was ever put in."""
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    @property
    def state(self) -> tuple:
        """What makes another one the same."""
        return self.keys, self.values, self.offset, self._first

    @state.setter
    def state(self, state: tuple) -> None:
        self.keys, self.values, self.offset, self._first = state

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        held, end = self.offset - self._first, keys.shape[2]
        if self.keys is not None and held + end <= self.keys.shape[2]:
            return
        drop = max(0, held - (self.max_size - 1 + SLACK))
        end += held - drop
        room = -(-end // STEP) * STEP if end < self.max_size else end + STEP
        self.keys = _moved(self.keys, keys, drop, held, room)
        self.values = _moved(self.values, values, drop, held, room)
        self._first += drop


def _moved(
    buffer: mx.array | None, like: mx.array, drop: int, held: int, room: int
) -> mx.array:
    """A buffer of `room` positions that begins with the old one's [drop:held]."""
    batch, heads, _, width = like.shape
    kept = [] if buffer is None else [buffer[..., drop:held, :]]
    fresh = mx.zeros((batch, heads, room - (held - drop), width), like.dtype)
    return mx.concatenate([*kept, fresh], axis=2)
