"""A draft put to the test: what was predicted of it, and what is measured."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from ..generation.engine import Generator
from ..generation.sampling import Sampling
from ..generation.speculative.decoder import SpeculativeStats
from ..generation.speculative.draft_length import DraftLengthController
from ..generation.speculative.draft_model import DraftModelProposer
from ..generation.speculative.prompt_lookup import PromptLookupProposer
from ..generation.speculative.proposer import Proposer
from .acceptance import (
    ReferenceCompletion,
    all_acceptance_probs,
    predict_accepted_lengths,
)
from .cost_model import SpeculationCosts

PLAIN, PROMPT_LOOKUP = "plain", "prompt_lookup"
BASELINE_MODEL, DRAFT = "baseline_model", "draft"


def decoding_modes(temperature: float, seed: int) -> dict[str, Sampling]:
    """How a draft is tried, by name: greedily, and drawn at a temperature."""
    drawn = Sampling(temperature=temperature, seed=seed)
    return {"greedy": Sampling(), f"temperature {temperature:g}": drawn}


def with_seed_offset(sampling: Sampling, number: int) -> Sampling:
    """Of the prompt of a number: every answer has draws of its own."""
    return replace(sampling, seed=sampling.seed + number)


@dataclass(frozen=True)
class DecodingStats:
    """How one way of decoding went over some prompts.

    Attributes:
        tokens_per_second: of all tokens but the first of every answer.
        speedup: that as a multiple of plain decoding's.
        acceptance: share of the guesses that stood, of those whose predecessors stood.
        accepted_length: tokens of a step of the target, with guesses or without.
        guesses: of a round.
    """

    tokens_per_second: float
    speedup: float = 1.0
    acceptance_rate: float | None = None
    accepted_length: float | None = None
    num_draft_tokens: int = 0


# By way of decoding.
StatsByPromptSet = dict[str, DecodingStats]


@dataclass(frozen=True)
class DraftBenchmarkResult:
    """A draft's trial with one way of sampling.

    Attributes:
        columns: over all prompts.
        suites: the same by suite.
        chance: of a guess to stand, at all places of the plain answers on average.
        length: guesses of a round, those that are predicted to pay most.
        predicted_tokens: of such a round, along the plain answers.
        curve: the same for 1, 2, ... guesses.
    """

    stats: StatsByPromptSet
    prompt_sets: dict[str, StatsByPromptSet]
    predicted_acceptance_rate: float
    num_draft_tokens: int
    predicted_accepted_length: float
    predicted_speedup: float
    predicted_accepted_lengths: list[float]

    def by_name(self, how: str) -> dict[str, StatsByPromptSet]:
        """Over all prompts, by the name of the way of sampling, and by suite."""
        own = {
            f"{how}, {suite}": columns for suite, columns in self.prompt_sets.items()
        }
        return {how: self.stats} | own

    def to_json(self) -> dict:
        """For reports: by proposer, and what was predicted of the draft."""
        return _to_json(self.stats) | {
            "prompt_sets": {
                name: _to_json(own) for name, own in self.prompt_sets.items()
            },
            "predicted_acceptance_rate": self.predicted_acceptance_rate,
            "num_draft_tokens": self.num_draft_tokens,
            "predicted_accepted_length": self.predicted_accepted_length,
            "predicted_speedup": self.predicted_speedup,
            "predicted_accepted_lengths": self.predicted_accepted_lengths,
        }


def _to_json(columns: StatsByPromptSet) -> dict:
    return {name: vars(column) for name, column in columns.items()}


@dataclass(frozen=True)
class Candidate:
    """A model that guesses, and what its rounds cost."""

    model: Any
    costs: SpeculationCosts


@dataclass(frozen=True)
class _Completion:
    """An answer, the seconds that its tokens but the first took, and its rounds."""

    tokens: list[int]
    seconds: float
    rounds: SpeculativeStats


class DraftBenchmark:
    """Prompts answered plainly, with lookup and with a draft.

    Args:
        target: maps tokens [B, L] and a list of caches to logits [B, L, V].
        suites: tokens of prompts, by the suite's name.
        sibling: another draft, for a column of its own.
    """

    def __init__(
        self,
        target: Any,
        draft: Candidate,
        tokenizer: Any,
        suites: Mapping[str, Sequence[Sequence[int]]],
        *,
        max_tokens: int,
        baseline_model: Candidate | None = None,
    ):
        self.target, self.draft, self.baseline_model = target, draft, baseline_model
        self.tokenizer = tokenizer
        self.places = [name for name, own in suites.items() for _ in own]
        self.prompts = [prompt for own in suites.values() for prompt in own]
        self.max_tokens = max_tokens

    def run(self, sampling: Sampling) -> DraftBenchmarkResult:
        """Answer all prompts in every way; the text is the target's in each."""
        answers = {PLAIN: self._answered(None, 0, sampling)}
        texts = [said.tokens for said in answers[PLAIN]]
        pairs = zip(self.prompts, texts, strict=True)
        heard = [
            ReferenceCompletion(self.target, prompt, said, sampling)
            for prompt, said in pairs
        ]
        stands = all_acceptance_probs(heard, self.draft.model)
        curve = predict_accepted_lengths(stands)
        mean = float(np.mean([len(text) - 1 for text in texts])) or math.inf
        length, speedup = self.draft.costs.best(curve, mean)
        guesses = {PLAIN: 0, PROMPT_LOOKUP: length, DRAFT: length}
        answers[PROMPT_LOOKUP] = self._answered(PromptLookupProposer, length, sampling)
        if other := self.baseline_model:
            own = predict_accepted_lengths(all_acceptance_probs(heard, other.model))
            guesses[BASELINE_MODEL], _ = other.costs.best(own, mean)
            answers[BASELINE_MODEL] = self._guessed(
                other, guesses[BASELINE_MODEL], sampling
            )
        answers[DRAFT] = self._guessed(self.draft, length, sampling)
        suites = {
            name: self._columns(answers, guesses, name)
            for name in dict.fromkeys(self.places)
        }
        places = np.concatenate([*stands, []])
        chance = float(places.mean()) if places.size else 0.0
        columns = self._columns(answers, guesses)
        return DraftBenchmarkResult(
            columns, suites, chance, length, curve[length - 1], speedup, curve
        )

    def _guessed(
        self, rival: Candidate, length: int, sampling: Sampling
    ) -> list[_Completion]:
        # Of the same draws for every answer all would be lucky, or none.
        draws = count()
        return self._answered(
            lambda: DraftModelProposer(rival.model, seed=next(draws)), length, sampling
        )

    def _columns(
        self,
        answers: dict[str, list[_Completion]],
        guesses: dict[str, int],
        suite: str | None = None,
    ) -> StatsByPromptSet:
        """Of one suite, or of all."""
        taken = [suite in (None, place) for place in self.places]
        found: StatsByPromptSet = {}
        for name, said in answers.items():
            own = [one for one, is_of_it in zip(said, taken, strict=True) if is_of_it]
            found[name] = _stats(own, found.get(PLAIN), guesses[name])
        return found

    def _answered(
        self, propose: Callable[[], Proposer] | None, length: int, sampling: Sampling
    ) -> list[_Completion]:
        generator = Generator(
            self.target,
            self.tokenizer,
            make_proposer=propose,
            draft_length=DraftLengthController(
                max_draft_tokens=max(1, length), fixed=length
            ),
        )

        def said(prompt: Sequence[int], number: int) -> _Completion:
            settings = {
                "max_tokens": self.max_tokens,
                "sampling": with_seed_offset(sampling, number),
            }
            pieces = generator.stream(prompt, **settings)
            tokens = [next(pieces).token]
            start = time.perf_counter()
            tokens += [piece.token for piece in pieces]
            seconds = time.perf_counter() - start
            return _Completion(tokens, seconds, generator.speculative_stats)

        # What is compiled when first used is not timed.
        said(self.prompts[0], 0)
        return [said(prompt, number) for number, prompt in enumerate(self.prompts)]


def _stats(
    said: list[_Completion], plain: DecodingStats | None, guesses: int
) -> DecodingStats:
    """How answers went; `plain` is the same prompts' without guesses."""
    total = SpeculativeStats()
    if plain:
        for one in said:
            total.merge(one.rounds)
    tokens, steps = (
        sum(len(one.tokens) - 1 for one in said),
        total.rounds + total.standard_tokens,
    )
    # Answers of one token each have no speed.
    rate = tokens / (sum(one.seconds for one in said) or math.inf)
    gain = rate / (plain.tokens_per_second or math.inf) if plain else 1.0
    rounds = tokens / steps if steps else None
    return DecodingStats(rate, gain, total.acceptance_rate, rounds, guesses)
