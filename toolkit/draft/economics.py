"""What guessing costs on this machine, and what it brings at a rate of acceptance."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generate.session import Session

LONGEST = 8
"""Guesses of a round, at most."""
REPEATS = 5
# Tokens that the caches hold when a step is timed.
CONTEXT = 32


@dataclass(frozen=True)
class Costs:
    """Of a target and its draft, in plain steps of the target.

    Attributes:
        verify: a step of 1, 2, ... rows; the first is 1.
        draft: one guess.
    """

    verify: tuple[float, ...]
    draft: float

    def speedup(self, tokens: float, guesses: int) -> float:
        """Of rounds of so many guesses that give so many tokens on average.

        tokens / (V(k + 1) + k c): arXiv 2211.17192, theorem 3.8, but with rows of the
        verification that cost what they cost.
        """
        return tokens / (self.verify[guesses] + guesses * self.draft)

    def best(self, tokens: Sequence[float]) -> tuple[int, float]:
        """The number of guesses that pays most, at least 1, and its speed-up.

        Args:
            tokens: of a round, by number of guesses from 1 on.
        """
        found = {k: self.speedup(t, k) for k, t in enumerate(tokens, 1)}
        length = max(found, key=found.get)
        return length, found[length]

    def to_json(self) -> dict:
        """For reports."""
        return {"verify": list(self.verify), "draft": self.draft}


def measure(target: Any, draft: Any) -> Costs:
    """Time both models: steps of the target by rows, a guess of the draft."""
    plain = seconds(target, 1)
    rows = [seconds(target, count) / plain for count in range(2, LONGEST + 2)]
    return Costs((1.0, *rows), seconds(draft, 1) / plain)


def seconds(model: Any, rows: int) -> float:
    """Of a step of so many rows, the shortest of some."""
    session, times = Session(model), []
    mx.eval(session.read(mx.zeros((1, CONTEXT), mx.int32)))
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        mx.eval(session.read(mx.zeros((1, rows), mx.int32)))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def tokens_per_round(texts: Sequence[np.ndarray], guesses: int) -> float:
    """Of rounds of so many guesses, on average, along texts of a target.

    Rounds begin where the ones before them end, so the chances of every place to be a
    beginning are followed through the text; the first token of a text is no round's.

    Args:
        texts: for every token but the first of an answer, the chance that a guess
            stands there: [L - 1] each.
    """
    tokens, rounds = 0, 0.0
    for stands in texts:
        length = len(stands)
        begins = np.zeros(length + 1)
        begins[0] = 1.0
        for place in range(length):
            chance = begins[place]
            rounds += chance
            # The round ends with the first guess that falls, or one token after all.
            for end in range(place, min(place + guesses, length)):
                begins[end + 1] += chance * (1 - stands[end])
                chance *= stands[end]
            begins[min(place + guesses + 1, length)] += chance
        tokens += length
    return tokens / rounds if rounds else 1.0
