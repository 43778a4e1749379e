"""A draft put to the test: what was predicted of it, and what is measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..generate.controller import Controller
from ..generate.engine import Generator
from ..generate.proposal import Proposer
from ..generate.proposers.draft import Draft
from ..generate.proposers.lookup import Lookup
from ..generate.sampling import Sampling, filtered
from ..generate.speculate import Speculation
from .economics import LONGEST, Costs, tokens_per_round

PLAIN, LOOKUP, DRAFT = "plain", "lookup", "draft"


@dataclass(frozen=True)
class Column:
    """How one way of decoding went over all prompts.

    Attributes:
        speedup: tokens per second as a multiple of plain decoding's.
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
        length: guesses of a round, those that are predicted to pay most.
        predicted_tokens: of such a round, along the plain answers.
        curve: the same for 1, 2, ... guesses.
    """

    columns: dict[str, Column]
    length: int
    predicted_tokens: float
    predicted_speedup: float
    curve: list[float]

    def to_json(self) -> dict:
        """For reports: by proposer, and what was predicted of the draft."""
        proposers = {name: vars(column) for name, column in self.columns.items()}
        return proposers | {
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
        stands = [
            stands_along(self.target, self.draft, prompt, text, sampling)
            for prompt, text in zip(self.prompts, texts, strict=True)
            # The first token is no guess's.
            if len(text) > 1
        ]
        curve = [tokens_per_round(stands, k) for k in range(1, LONGEST + 1)]
        length, speedup = self.costs.best(curve)
        columns = {PLAIN: plain}
        proposers = {LOOKUP: Lookup, DRAFT: self._drafting}
        for name, propose in proposers.items():
            column, _ = self._column(propose, length, sampling)
            gain = column.tokens_per_second / plain.tokens_per_second
            columns[name] = Column(**vars(column) | {"speedup": gain})
        return Found(columns, length, curve[length - 1], speedup, curve)

    def _drafting(self) -> Draft:
        return Draft(self.draft)

    def _column(
        self, propose: Callable[[], Proposer] | None, length: int, sampling: Sampling
    ) -> tuple[Column, list[list[int]]]:
        generator = Generator(
            self.target,
            self.tokenizer,
            propose=propose,
            controller=Controller(longest=max(1, length), fixed=length),
        )

        def said(prompt: Sequence[int], number: int) -> list[int]:
            now = replace(sampling, seed=sampling.seed + number)
            settings = {"max_tokens": self.max_tokens, "sampling": now}
            return [piece.token for piece in generator.stream(prompt, **settings)]

        # What is compiled when first used is not timed.
        said(self.prompts[0], 0)
        texts, seconds, total = [], 0.0, Speculation()
        for number, prompt in enumerate(self.prompts):
            start = time.perf_counter()
            texts.append(said(prompt, number))
            seconds += time.perf_counter() - start
            if propose:
                total.include(generator.speculation)
        rate = sum(map(len, texts)) / seconds
        # The first token of an answer is no step's of these.
        tokens, steps = sum(len(text) - 1 for text in texts), total.rounds + total.plain
        rounds = tokens / steps if steps else None
        return Column(rate, 1.0, total.acceptance, rounds), texts


def stands_along(
    target: Any,
    draft: Any,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: Sampling,
) -> np.ndarray:
    """The chance that a guess stands at every token of a text but the first.

    The text is the target's, drawn with `sampling`. Of a token x that was drawn from p
    a guess from q had been accepted with probability min(1, q(x) / p(x)); a greedy
    guess stands where it is x.
    """
    tokens = mx.array([[*prompt, *text]], mx.int32)
    behind = slice(len(prompt), tokens.shape[1] - 1)
    said = mx.array(text[1:], mx.int32)
    laws = [model(tokens)[0, behind] for model in (target, draft)]
    width = min(logits.shape[-1] for logits in laws)
    if sampling.is_greedy:
        stands = mx.argmax(laws[1][:, :width], axis=-1) == said
        return np.array(stands).astype(float)
    chosen = []
    for logits in laws:
        logits = filtered(logits[:, :width], sampling)
        score = mx.take_along_axis(logits, said[:, None], axis=-1)[:, 0]
        chosen.append(score - mx.logsumexp(logits, axis=-1))
    return np.array(mx.minimum(1.0, mx.exp(chosen[1] - chosen[0]))).astype(float)
