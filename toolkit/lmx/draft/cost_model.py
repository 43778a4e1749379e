"""Cost model of speculative decoding: measured round times and predicted speed-up."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generation.engine import Engine
from ..generation.sampling import Sampling
from ..generation.sequence import GenerationRequest
from ..generation.speculative.draft_length import DraftLengthController
from .candidates import Candidate

REPEATS = 7
# More tokens than are ever decoded.
UNLIMITED = 1 << 20
# Sampling takes longer than argmax.
SAMPLING = Sampling(temperature=1.0)


@dataclass(frozen=True)
class SpeculationCosts:
    """Times of a target and its draft, in units of one standard decode step.

    Attributes:
        rounds: time of a standard step, which is 1, and of rounds with 1, 2, ... draft
            tokens: drafting, verification, sampling and rollback.
        prefill: time the draft model needs for the prompt.
    """

    rounds: tuple[float, ...]
    prefill: float = 0.0

    def speedup(
        self,
        accepted_length: float,
        num_draft_tokens: int,
        completion_length: float = math.inf,
    ) -> float:
        """The predicted speed-up over standard decoding.

        As in arXiv 2211.17192, theorem 3.8, but with measured round times.

        Args:
            accepted_length: mean tokens per round.
            completion_length: tokens over which the prefill time is spread.
        """
        prefill = self.prefill / completion_length
        return 1 / (self.rounds[num_draft_tokens] / accepted_length + prefill)

    def best_draft_length(
        self, accepted_lengths: Sequence[float], completion_length: float = math.inf
    ) -> tuple[int, float]:
        """The number of draft tokens, at least 1, with the best speed-up; and both.

        Args:
            accepted_lengths: mean tokens per round with 1, 2, ... draft tokens.
        """
        speedups = {
            num_draft_tokens: self.speedup(length, num_draft_tokens, completion_length)
            for num_draft_tokens, length in enumerate(accepted_lengths, 1)
        }
        best = max(speedups, key=speedups.get)
        return best, speedups[best]

    def to_json(self) -> dict:
        """The costs for reports."""
        return {"rounds": list(self.rounds), "prefill": self.prefill}


def measure_speculation_costs(
    target: Any, candidate: Candidate, *, prompt_length: int
) -> SpeculationCosts:
    """Measure standard decoding, and rounds with every number of draft tokens.

    The measurements take turns, and the shortest time of each counts, so that load from
    other processes affects none of them alone.

    Args:
        prompt_length: tokens of the prompt.
    """
    counts = range(1, candidate.max_draft_tokens + 1)
    with ExitStack() as stack:
        steps = [_steps(target, prompt_length)]
        steps += [
            _steps(
                target,
                prompt_length,
                make_proposer=candidate.make_proposer,
                draft_length=DraftLengthController(fixed=count),
            )
            for count in counts
        ]
        steps += [_prefills(candidate, tokens) for tokens in (1, prompt_length)]
        seconds = [math.inf] * len(steps)
        for step in steps:
            stack.enter_context(closing(step))
            # Compilation and prefill are not timed.
            next(step)
            next(step)
        for number, step in list(enumerate(steps)) * REPEATS:
            mx.synchronize()
            start = time.perf_counter()
            next(step)
            # A step leaves as much work in flight as the step before it left.
            mx.synchronize()
            seconds[number] = min(seconds[number], time.perf_counter() - start)
    *rounds, one_token, prompt = seconds
    # A shorter draft never takes longer; a measurement that says so is noise.
    rounds = np.minimum.accumulate(rounds[::-1])[::-1]
    # A round already includes one token of the prefill.
    prefill = max(0.0, prompt - one_token)
    return SpeculationCosts(
        tuple((rounds / rounds[0]).tolist()), prefill / float(rounds[0])
    )


def _steps(target: Any, prompt_length: int, **options: Any) -> Iterator[None]:
    """Steps of an engine with one request, after its prefill."""
    engine = Engine(target, **options)
    engine.add_request(GenerationRequest([0] * prompt_length, UNLIMITED, SAMPLING))
    while not engine.step():
        pass
    while True:
        yield
        engine.step()


def _prefills(candidate: Candidate, num_tokens: int) -> Iterator[None]:
    """Forward passes of the draft over a new prompt."""
    while True:
        candidate.prefill(num_tokens)
        yield
