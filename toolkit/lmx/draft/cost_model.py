"""What guessing costs on this machine, and what it brings."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generation.decode_loop import BatchSampler, decode
from ..generation.kv_cache import CacheState
from ..generation.sampling import Sampling
from ..generation.speculative.decoder import SpeculativeDecoder
from ..generation.speculative.draft_length import DraftLengthController
from ..generation.speculative.draft_model import DraftModelProposer

MAX_DRAFT_TOKENS = 8
"""Guesses of a round, at most."""
REPEATS = 7
# Tokens of a prompt that are read at once, and those to decode, more than enough.
STEP, ENDLESS = 512, 1 << 20
# Drawn, which takes longer than choosing the likeliest.
DRAWN = Sampling(temperature=1.0)


@dataclass(frozen=True)
class SpeculationCosts:
    """Of a target and its draft, in tokens of plain decoding.

    Attributes:
        rounds: of a plain token, which is 1, and of rounds with 1, 2, ... guesses, all
            that belongs to them: guessing, verifying, choosing, taking back.
        prefill: of a prompt by the draft, which plain decoding does not have.
    """

    rounds: tuple[float, ...]
    prefill: float = 0.0

    def speedup(self, tokens: float, guesses: int, said: float = math.inf) -> float:
        """Of rounds of so many guesses that give so many tokens on average.

        As arXiv 2211.17192, theorem 3.8, but with rounds that cost what they cost.

        Args:
            said: tokens of an answer, over which the reading is spread.
        """
        return 1 / (self.rounds[guesses] / tokens + self.prefill / said)

    def best(
        self, tokens: Sequence[float], said: float = math.inf
    ) -> tuple[int, float]:
        """The number of guesses that pays most, at least 1, and its speed-up.

        Args:
            tokens: of a round, by number of guesses from 1 on.
            said: as above.
        """
        found = {k: self.speedup(t, k, said) for k, t in enumerate(tokens, 1)}
        length = max(found, key=found.get)
        return length, found[length]

    def to_json(self) -> dict:
        """For reports."""
        return {"rounds": list(self.rounds), "prefill": self.prefill}


def measure_speculation_costs(
    target: Any, draft: Any, *, prompt_length: int
) -> SpeculationCosts:
    """Time decoding with a target alone, and with all numbers of guesses of a draft.

    All in turn, the shortest of some each, so that what else the machine does at a
    time is not taken for what one of them costs.

    Args:
        prompt: tokens of one.
    """
    counts = range(1, MAX_DRAFT_TOKENS + 1)
    with ExitStack() as stack:
        ways = [_time_plain(target, prompt_length)]
        ways += [
            _time_rounds(target, draft, prompt_length, guesses) for guesses in counts
        ]
        ways += [_time_prefill(draft, tokens) for tokens in (1, prompt_length)]
        timed = [_Timer(stack.enter_context(closing(way))) for way in ways]
        for _ in range(REPEATS):
            for way in timed:
                way.run()
    *rounds, token, whole = (way.seconds for way in timed)
    # Fewer guesses take no longer; where they seem to, it was somebody else's work.
    rounds = np.minimum.accumulate(rounds[::-1])[::-1]
    # A round reads a token by itself.
    reading = max(0.0, whole - token)
    return SpeculationCosts(
        tuple((rounds / rounds[0]).tolist()), reading / float(rounds[0])
    )


class _Timer:
    """A way of decoding, and the shortest its steps took."""

    def __init__(self, steps: Iterator[None]):
        self.seconds = math.inf
        self._steps = steps
        # What is compiled when first used is not timed, nor is reading the prompt.
        for _ in range(2):
            next(steps)

    def run(self) -> None:
        mx.synchronize()
        start = time.perf_counter()
        next(self._steps)
        # What it leaves in flight for its next step is as much as it found done.
        mx.synchronize()
        self.seconds = min(self.seconds, time.perf_counter() - start)


def _time_plain(target: Any, prompt: int) -> Iterator[None]:
    """Tokens, one by one."""
    prompts = [[0] * prompt]
    choose = BatchSampler(DRAWN, prompts)
    session = CacheState(target)
    for token, _ in decode(session, prompts, ENDLESS, choose, prefill_step_size=STEP):
        token.item()
        yield


def _time_rounds(target: Any, draft: Any, prompt: int, guesses: int) -> Iterator[None]:
    """Rounds, one by one, each with the reading of the tokens of the one before."""
    speculator = SpeculativeDecoder(
        CacheState(target),
        DraftModelProposer(draft),
        draft_length=DraftLengthController(max_draft_tokens=guesses, fixed=guesses),
        sampling=DRAWN,
    )
    done = 0
    for _ in speculator.decode([0] * prompt, ENDLESS):
        if speculator.stats.rounds > done:
            done = speculator.stats.rounds
            yield


def _time_prefill(draft: Any, count: int) -> Iterator[None]:
    """What a draft does when it first sees so many tokens, again and again."""
    while True:
        mx.eval(CacheState(draft).forward(mx.zeros((1, count), mx.int32)))
        yield
