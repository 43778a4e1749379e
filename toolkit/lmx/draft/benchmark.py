"""Draft benchmark: predicted and measured speed-up of speculative decoding."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..generation.generator import Generator
from ..generation.sampling import Sampling
from ..generation.speculative.draft_length import (
    DraftLengthController,
    SpeculativeStats,
)
from ..generation.speculative.prompt_lookup import PromptLookupProposer
from ..generation.speculative.proposer import MakeProposer
from ..interfaces import Logger
from .acceptance import ReferenceCompletion, predict_accepted_lengths
from .candidates import Candidate, all_acceptance_probs
from .cost_model import SpeculationCosts

STANDARD, PROMPT_LOOKUP = "standard", "prompt_lookup"
DRAFT = "draft"


def decoding_modes(temperature: float, seed: int) -> dict[str, Sampling]:
    """The sampling settings of a benchmark by name: greedy, and sampled."""
    sampled = Sampling(temperature=temperature, seed=seed)
    return {"greedy": Sampling(), f"temperature {temperature:g}": sampled}


@dataclass(frozen=True)
class DecodingStats:
    """Speed and acceptance of one decoder over a set of prompts.

    Attributes:
        tokens_per_second: over all tokens but the first of every completion.
        speedup: relative to standard decoding.
        acceptance_rate: accepted share of the draft tokens whose predecessors were
            accepted; None = no draft tokens.
        acceptance_rate_by_position: the same of the first, second, ... draft token.
        accepted_length: tokens per forward pass of the target.
        num_draft_tokens: draft tokens per round.
    """

    tokens_per_second: float
    speedup: float = 1.0
    acceptance_rate: float | None = None
    acceptance_rate_by_position: tuple[float, ...] = ()
    accepted_length: float | None = None
    num_draft_tokens: int = 0


DecoderStats = dict[str, DecodingStats]
"""Statistics by decoder: standard, prompt lookup and draft."""


@dataclass(frozen=True)
class DraftBenchmarkResult:
    """The result of a benchmark in one decoding mode.

    Attributes:
        stats: over all prompts.
        prompt_sets: by prompt set.
        predicted_acceptance_rate: of first draft tokens, teacher-forced, mean over all
            positions.
        num_draft_tokens: the draft length with the best predicted speed-up.
        predicted_accepted_length: with this draft length.
        predicted_accepted_lengths: with 1, 2, ... draft tokens.
    """

    stats: DecoderStats
    prompt_sets: dict[str, DecoderStats]
    predicted_acceptance_rate: float
    num_draft_tokens: int
    predicted_accepted_length: float
    predicted_speedup: float
    predicted_accepted_lengths: list[float]

    def by_name(self, mode: str) -> dict[str, DecoderStats]:
        """The statistics over all prompts as `mode`, and of every prompt set."""
        sets = {f"{mode}, {name}": stats for name, stats in self.prompt_sets.items()}
        return {mode: self.stats} | sets

    def to_json(self) -> dict:
        """The statistics by decoder and the predictions, for reports."""
        result = asdict(self)
        return result.pop("stats") | result


@dataclass(frozen=True)
class _Completion:
    """A completion, and the seconds for all tokens but the first."""

    tokens: list[int]
    seconds: float
    stats: SpeculativeStats | None


class DraftBenchmark:
    """Decodes prompts without a draft, with prompt lookup, and with a draft model.

    Args:
        target: maps tokens [B, L] and a list of caches to logits [B, L, V].
        costs: of the draft.
        prompt_sets: prompt tokens by the name of the prompt set.
        logger: shows the progress. None = none is shown.
    """

    def __init__(
        self,
        target: Any,
        draft: Candidate,
        costs: SpeculationCosts,
        tokenizer: Any,
        prompt_sets: Mapping[str, Sequence[Sequence[int]]],
        *,
        max_tokens: int,
        logger: Logger | None = None,
    ):
        self.logger = logger or Logger()
        self.target, self.draft, self.costs = target, draft, costs
        self.tokenizer = tokenizer
        self.set_names = [
            name for name, prompts in prompt_sets.items() for _ in prompts
        ]
        self.prompts = [p for prompts in prompt_sets.values() for p in prompts]
        self.max_tokens = max_tokens

    def run(self, sampling: Sampling) -> DraftBenchmarkResult:
        """Decode all prompts with every decoder; the output is the target's in each."""
        completions = {STANDARD: self._decode(None, 0, sampling)}
        references = [
            ReferenceCompletion(
                self.target,
                prompt,
                completion.tokens,
                sampling.with_seed_offset(index),
            )
            for index, (prompt, completion) in enumerate(
                zip(self.prompts, completions[STANDARD], strict=True)
            )
        ]
        mean = np.mean([len(reference.tokens) - 1 for reference in references])
        mean_length = float(mean) or math.inf
        probs = all_acceptance_probs(references, self.draft)
        lengths = predict_accepted_lengths(probs)
        best, speedup = self.costs.best_draft_length(lengths, mean_length)
        num_draft_tokens = {STANDARD: 0, PROMPT_LOOKUP: best, DRAFT: best}
        completions[PROMPT_LOOKUP] = self._decode(
            lambda _: PromptLookupProposer(), best, sampling
        )
        completions[DRAFT] = self._decode(self.draft.make_proposer, best, sampling)
        first_probs = np.concatenate([*(p[:, 0] for p in probs), []])
        return DraftBenchmarkResult(
            stats=self._stats(completions, num_draft_tokens),
            prompt_sets={
                name: self._stats(completions, num_draft_tokens, name)
                for name in dict.fromkeys(self.set_names)
            },
            predicted_acceptance_rate=float(first_probs.mean())
            if first_probs.size
            else 0.0,
            num_draft_tokens=best,
            predicted_accepted_length=lengths[best - 1],
            predicted_speedup=speedup,
            predicted_accepted_lengths=lengths,
        )

    def _decode(
        self,
        make_proposer: MakeProposer | None,
        num_draft_tokens: int,
        sampling: Sampling,
    ) -> list[_Completion]:
        generator = Generator(
            self.target,
            self.tokenizer,
            make_proposer=make_proposer,
            draft_length=DraftLengthController(fixed=num_draft_tokens),
        )

        def complete(prompt: Sequence[int], index: int) -> _Completion:
            responses = generator.stream(
                prompt,
                max_tokens=self.max_tokens,
                sampling=sampling.with_seed_offset(index),
            )
            tokens = [next(responses).token]
            start = time.perf_counter()
            tokens += [response.token for response in responses]
            seconds = time.perf_counter() - start
            return _Completion(tokens, seconds, generator.speculative_stats)

        # Warm-up: compilation is not timed.
        complete(self.prompts[0], 0)
        with self.logger.progress(len(self.prompts), "benchmark prompts") as progress:
            prompts = progress.track(self.prompts)
            return [complete(prompt, index) for index, prompt in enumerate(prompts)]

    def _stats(
        self,
        completions: dict[str, list[_Completion]],
        num_draft_tokens: dict[str, int],
        set_name: str | None = None,
    ) -> DecoderStats:
        """The statistics of every decoder, over one prompt set or over all."""
        results: DecoderStats = {}
        for name, all_completions in completions.items():
            pairs = zip(all_completions, self.set_names, strict=True)
            selected = [one for one, owner in pairs if set_name in (None, owner)]
            tokens = sum(len(completion.tokens) - 1 for completion in selected)
            # Completions of a single token have no decode time.
            rate = tokens / (sum(one.seconds for one in selected) or math.inf)
            if name == STANDARD:
                results[name] = DecodingStats(rate)
                continue
            total = SpeculativeStats()
            for completion in selected:
                total.merge(completion.stats)
            passes = total.rounds + total.standard_tokens
            results[name] = DecodingStats(
                rate,
                speedup=rate / (results[STANDARD].tokens_per_second or math.inf),
                acceptance_rate=total.acceptance_rate,
                acceptance_rate_by_position=tuple(total.acceptance_rate_by_position),
                accepted_length=(tokens + len(selected)) / passes if passes else None,
                num_draft_tokens=num_draft_tokens[name],
            )
        return results
