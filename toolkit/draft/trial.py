"""A draft put to the test: what was predicted of it, and what is measured."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from ..generate.controller import Controller
from ..generate.engine import Generator
from ..generate.proposal import Proposer
from ..generate.proposers.draft import Draft
from ..generate.proposers.lookup import Lookup
from ..generate.sampling import Sampling
from ..generate.speculate import Speculation
from .economics import Costs
from .exam import Text, all_stand, curve_of

PLAIN, LOOKUP, DRAFT = "plain", "lookup", "draft"


def ways(temperature: float, seed: int) -> dict[str, Sampling]:
    """How a draft is tried, by name: greedily, and drawn at a temperature."""
    drawn = Sampling(temperature=temperature, seed=seed)
    return {"greedy": Sampling(), f"temperature {temperature:g}": drawn}


def numbered(sampling: Sampling, number: int) -> Sampling:
    """Of the prompt of a number: every answer has draws of its own."""
    return replace(sampling, seed=sampling.seed + number)


@dataclass(frozen=True)
class Column:
    """How one way of decoding went over all prompts.

    Attributes:
        tokens_per_second: of all tokens but the first of every answer.
        speedup: that as a multiple of plain decoding's.
        acceptance: share of the guesses that stood, of those whose predecessors stood.
        tokens_per_round: tokens of a step of the target, with guesses or without.
    """

    tokens_per_second: float
    speedup: float = 1.0
    acceptance: float | None = None
    tokens_per_round: float | None = None


@dataclass(frozen=True)
class Found:
    """A draft's trial with one way of sampling.

    Attributes:
        chance: of a guess to stand, at all places of the plain answers on average.
        length: guesses of a round, those that are predicted to pay most.
        predicted_tokens: of such a round, along the plain answers.
        curve: the same for 1, 2, ... guesses.
    """

    columns: dict[str, Column]
    chance: float
    length: int
    predicted_tokens: float
    predicted_speedup: float
    curve: list[float]

    def to_json(self) -> dict:
        """For reports: by proposer, and what was predicted of the draft."""
        proposers = {name: vars(column) for name, column in self.columns.items()}
        return proposers | {
            "chance": self.chance,
            "draft_length": self.length,
            "predicted_tokens_per_round": self.predicted_tokens,
            "predicted_speedup": self.predicted_speedup,
            "predicted_curve": self.curve,
        }


class Trial:
    """Prompts answered plainly, with lookup and with a draft.

    Args:
        target, draft: map tokens [B, L] and a list of caches to logits [B, L, V].
    """

    def __init__(
        self,
        target: Any,
        draft: Any,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        *,
        costs: Costs,
        max_tokens: int,
    ):
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.prompts = prompts
        self.costs = costs
        self.max_tokens = max_tokens

    def run(self, sampling: Sampling) -> Found:
        """Answer all prompts in every way; the text is the target's in each."""
        plain, texts = self._column(None, 0, sampling)
        pairs = zip(self.prompts, texts, strict=True)
        heard = [Text(self.target, prompt, said, sampling) for prompt, said in pairs]
        stands = all_stand(heard, self.draft)
        curve = curve_of(stands)
        said = float(np.mean([len(text) - 1 for text in texts])) or math.inf
        length, speedup = self.costs.best(curve, said)
        columns = {PLAIN: plain}
        # Of the same draws for every answer all would be lucky, or none.
        draws = count()
        proposers = {
            LOOKUP: Lookup,
            DRAFT: lambda: Draft(self.draft, seed=next(draws)),
        }
        for name, propose in proposers.items():
            column, _ = self._column(propose, length, sampling)
            # Answers of one token each have no speed.
            gain = column.tokens_per_second / (plain.tokens_per_second or math.inf)
            columns[name] = Column(**vars(column) | {"speedup": gain})
        places = np.concatenate([*stands, []])
        chance = float(places.mean()) if places.size else 0.0
        return Found(columns, chance, length, curve[length - 1], speedup, curve)

    def _column(
        self, propose: Callable[[], Proposer] | None, length: int, sampling: Sampling
    ) -> tuple[Column, list[list[int]]]:
        generator = Generator(
            self.target,
            self.tokenizer,
            propose=propose,
            controller=Controller(longest=max(1, length), fixed=length),
        )

        def said(prompt: Sequence[int], number: int) -> tuple[list[int], float]:
            """An answer, and how long its tokens but the first took."""
            settings = {
                "max_tokens": self.max_tokens,
                "sampling": numbered(sampling, number),
            }
            pieces = generator.stream(prompt, **settings)
            tokens = [next(pieces).token]
            start = time.perf_counter()
            tokens += [piece.token for piece in pieces]
            return tokens, time.perf_counter() - start

        # What is compiled when first used is not timed.
        said(self.prompts[0], 0)
        texts, seconds, total = [], 0.0, Speculation()
        for number, prompt in enumerate(self.prompts):
            text, took = said(prompt, number)
            texts.append(text)
            seconds += took
            if propose:
                total.include(generator.speculation)
        tokens, steps = sum(len(text) - 1 for text in texts), total.rounds + total.plain
        rounds = tokens / steps if steps else None
        return Column(tokens / seconds, 1.0, total.acceptance, rounds), texts
