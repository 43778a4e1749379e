"""Hidden states of the tokens in a cache, recorded for a drafter."""

from typing import Self

import mlx.core as mx


class RecordedStates:
    """Outputs of a target's blocks for the tokens of one sequence.

    Args:
        layer_ids: the blocks, from 0.
        start: position of the first token that is recorded.
    """

    def __init__(self, layer_ids: tuple[int, ...], start: int):
        self.layer_ids = layer_ids
        self.start = self.end = start
        # Arrays [1, n, width], possibly lazy. They are joined only when they are read.
        self.arrays: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states."""
        return sum(states.nbytes for states in self.arrays)

    def append(self, states: mx.array) -> None:
        """Add the hidden states [1, n, width] of the next tokens."""
        self.arrays.append(states)
        self.end += states.shape[1]

    def trim(self, count: int) -> None:
        """Remove those of the last `count` tokens."""
        self.end -= count
        while count and self.arrays:
            last = self.arrays.pop()
            if last.shape[1] > count:
                self.arrays.append(last[:, :-count])
            count = max(0, count - last.shape[1])
        # Tokens before the first recorded one were removed.
        self.start = min(self.start, self.end)

    def since(self, position: int) -> mx.array:
        """Hidden states [1, n, width] from a position on, n >= 1."""
        assert self.start <= position < self.end
        first, parts = self.end, []
        # Only what is read is joined: a round of drafting reads the last few tokens.
        for states in reversed(self.arrays):
            first -= states.shape[1]
            parts.append(states)
            if first <= position:
                break
        joined = mx.concatenate(parts[::-1], axis=1) if len(parts) > 1 else parts[0]
        return joined[:, position - first :]

    @property
    def state(self) -> tuple:
        """Enough to restore them: blocks, first position and hidden states."""
        if not self.arrays:
            return self.layer_ids, self.end
        return self.layer_ids, self.start, self.since(self.start)

    @classmethod
    def from_state(cls, state: tuple) -> Self:
        """The states of which this is the `state`."""
        layer_ids, start, *arrays = state
        recorded = cls(tuple(layer_ids), start)
        for states in arrays:
            recorded.append(states)
        return recorded
