"""Guesses that what followed the last tokens before will follow them again."""

from collections.abc import Sequence

import mlx.core as mx

from ..proposal import NOTHING, Choice, Proposal

SHORTEST = 3


class Lookup:
    """Looks the last tokens up in the request, and in earlier ones if they are given.

    The longest run of tokens that was met before counts, and of those as long the last
    one (prompt lookup; arXiv 2411.04975 looks into earlier answers, too).

    Args:
        shortest: tokens that must be met again before anything is guessed.
        memory: what earlier requests read and said; see `Memory`.
    """

    def __init__(self, shortest: int = SHORTEST, memory: "Memory | None" = None):
        assert shortest > 0
        self._own = Memory(shortest)
        self._own.add([])
        self._memory = memory

    def propose(self, context: Sequence[int], count: int, choice: Choice) -> Proposal:
        """What followed, as far as `count` tokens."""
        self._own.extend(context)
        length, guess = self._own.following(context, count)
        if self._memory:
            longer, other = self._memory.following(context, count)
            if longer > length:
                guess = other
        return Proposal(mx.array(guess, mx.int32)) if guess else NOTHING


class Memory:
    """Texts as tokens, and where every short run in them was met last.

    Args:
        shortest: tokens of a run.
        limit: tokens that are remembered; the oldest texts go first.
    """

    def __init__(self, shortest: int = SHORTEST, limit: int = 1 << 20):
        self.shortest = shortest
        self._limit = limit
        self._texts: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._number = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a text; it may grow."""
        self._number += 1
        self._texts[self._number] = []
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The last text goes on: it is all of these tokens now."""
        text = self._texts[self._number]
        start, size = len(text), self.shortest
        text.extend(tokens[start:])
        # A run is known once something follows it.
        for end in range(max(size, start), len(text)):
            run = tuple(text[end - size : end])
            self._places.setdefault(run, []).append((self._number, end))
        while (
            sum(map(len, self._texts.values())) > self._limit and len(self._texts) > 1
        ):
            self._texts.pop(next(iter(self._texts)))

    @property
    def _size(self) -> int:
        return sum(map(len, self._texts.values()))

    def following(self, context: Sequence[int], count: int) -> tuple[int, list[int]]:
        """How many of the last tokens were met before, at most, and what followed."""
        if len(context) < self.shortest:
            return 0, []
        run = tuple(context[-self.shortest :])
        best, guess = 0, []
        places = self._places.get(run, [])
        places[:] = [place for place in places if place[0] in self._texts]
        for number, end in reversed(places[-CANDIDATES:]):
            text = self._texts[number]
            length = _shared(text[:end], context)
            if length > best:
                best, guess = length, text[end : end + count]
        return best, guess


CANDIDATES, LONGEST = 32, 64


def _shared(text: Sequence[int], context: Sequence[int]) -> int:
    length = 0
    most = min(len(text), len(context), LONGEST)
    while length < most and text[-1 - length] == context[-1 - length]:
        length += 1
    return length
