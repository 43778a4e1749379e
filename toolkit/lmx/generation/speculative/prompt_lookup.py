"""Guesses that what followed the last tokens before will follow them again."""

from collections.abc import Sequence

import mlx.core as mx

from .proposer import NO_DRAFT, DraftTokens, TargetSampler

SHORTEST = 3
# Places of a run that are looked at, the last ones, and tokens compared at each.
CANDIDATES, LONGEST = 32, 64


class PromptLookupProposer:
    """Looks the last tokens up in a memory, where it puts the request's own.

    The longest run of tokens that was met before counts, and of those as long the last
    one (prompt lookup; arXiv 2411.04975 looks into earlier answers, too).

    Args:
        memory: has what earlier requests read and said; None = an empty one.
    """

    def __init__(self, memory: "NGramIndex | None" = None):
        self._memory = memory or NGramIndex()
        self._text = self._memory.begin()

    def propose(
        self, context: Sequence[int], count: int, choice: TargetSampler
    ) -> DraftTokens:
        """What followed, as far as `count` tokens."""
        self._memory.extend(self._text, context)
        guess = self._memory.following(context, count)
        return DraftTokens(mx.array(guess, mx.int32)) if guess else NO_DRAFT


class NGramIndex:
    """Texts as tokens, and where every short run in them was met.

    Args:
        shortest: tokens of a run.
        limit: tokens that are remembered; the oldest texts go first, the newest stays.
    """

    def __init__(self, shortest: int = SHORTEST, limit: int = 1 << 20):
        assert shortest > 0
        self._shortest = shortest
        self._limit = limit
        self._size = 0
        self._texts: dict[int, list[int]] = {}
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._begun = 0

    def begin(self) -> int:
        """Remember one more text; its number."""
        self._begun += 1
        self._texts[self._begun] = []
        return self._begun

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """A text is all of these tokens now; one that is forgotten stays so."""
        if number not in self._texts:
            return
        text, size = self._texts[number], self._shortest
        start = len(text)
        text.extend(tokens[start:])
        self._size += len(text) - start
        # A run is known once something follows it.
        for end in range(max(size, start), len(text)):
            run = tuple(text[end - size : end])
            self._places.setdefault(run, []).append((number, end))
        while self._size > self._limit and len(self._texts) > 1:
            self._forget(next(iter(self._texts)))

    def following(self, context: Sequence[int], count: int) -> list[int]:
        """What followed the longest run of the last tokens that was met before."""
        run = tuple(context[-self._shortest :])
        best, guess = 0, []
        for number, end in reversed(self._places.get(run, [])[-CANDIDATES:]):
            text = self._texts[number]
            length = _shared(text, end, context)
            if length > best:
                best, guess = length, text[end : end + count]
        return guess

    def _forget(self, number: int) -> None:
        text, size = self._texts.pop(number), self._shortest
        self._size -= len(text)
        for run in {tuple(text[end - size : end]) for end in range(size, len(text))}:
            places = [place for place in self._places[run] if place[0] != number]
            if places:
                self._places[run] = places
            else:
                del self._places[run]


def _shared(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """How many tokens before `end` are the last ones of the context."""
    length = 0
    most = min(end, len(context), LONGEST)
    while length < most and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length
