"""What guessing costs on this machine, and what it brings at a rate of acceptance."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generate.session import Session

LONGEST = 8
"""Guesses of a round, at most."""
REPEATS = 7
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
    """Time both models: steps of the target by rows, a guess of the draft.

    All in turn, the shortest of some each, so that what else the machine does at a
    time is not taken for what one of them costs.
    """
    steps = [_Step(target, rows) for rows in range(1, LONGEST + 2)]
    steps.append(_Step(draft, 1))
    for _ in range(REPEATS):
        for step in steps:
            step.run()
    *verify, guess = (step.seconds for step in steps)
    # Fewer rows take no longer; where they seem to, it was somebody else's work.
    verify = np.minimum.accumulate(verify[::-1])[::-1]
    return Costs(tuple((verify / verify[0]).tolist()), guess / float(verify[0]))


class _Step:
    """A step of so many rows, and the shortest it took."""

    def __init__(self, model: Any, rows: int):
        self.seconds = math.inf
        self._session = Session(model)
        self._tokens = mx.zeros((1, rows), mx.int32)
        # What is compiled when first used is not timed.
        mx.eval(self._session.read(mx.zeros((1, CONTEXT), mx.int32)))
        mx.eval(self._session.read(self._tokens))

    def run(self) -> None:
        start = time.perf_counter()
        mx.eval(self._session.read(self._tokens))
        self.seconds = min(self.seconds, time.perf_counter() - start)


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
