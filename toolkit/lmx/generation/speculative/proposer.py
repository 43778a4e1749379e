"""What a proposer guesses, and the contract of all proposers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from ..logits_processors import LogitsProcessor
from ..sampling import Sampling, filter_logits


@dataclass(frozen=True)
class DraftTokens:
    """Tokens that may come next.

    Attributes:
        tokens: int32 [k], not yet computed perhaps; k may be 0.
        logits: float32 [k, V], those each token was drawn from: unnormalised
            log-probabilities. None = no draw: the tokens were certain.
    """

    tokens: mx.array
    logits: mx.array | None = None

    def __len__(self) -> int:
        return len(self.tokens)


NO_DRAFT = DraftTokens(mx.zeros(0, mx.int32))


class Proposer(Protocol):
    """Guesses what follows; must not change what the target will say.

    A proposer is told nothing of verdicts: it finds in the next context what of its
    guess has stayed.
    """

    def propose(
        self, context: Sequence[int], count: int, choice: "TargetSampler"
    ) -> DraftTokens:
        """At most `count` tokens that may follow the context.

        Args:
            context: all tokens so far, those of the prompt and those said.
        """
        ...


class TargetSampler:
    """How the target chooses, for proposers that want to choose alike.

    Args:
        sampling: of the request.
        context: counted once, the tokens said before the first round.
        vocabulary: tokens that the target tells apart.
    """

    def __init__(self, sampling: Sampling, context: Sequence[int], vocabulary: int):
        self.sampling = sampling
        self.vocabulary = vocabulary
        self.adjust = LogitsProcessor.needed(sampling, vocabulary)
        self.counts = self.adjust.begin([context]) if self.adjust else mx.zeros((1, 0))

    @property
    def is_greedy(self) -> bool:
        """Whether always the most likely token is chosen."""
        return self.sampling.is_greedy

    def after(self, counts: mx.array, tokens: mx.array) -> mx.array:
        """Counts [1, V] with tokens [k] more."""
        for token in tokens if self.adjust else []:
            counts = self.adjust.count(counts, token[None])
        return counts

    def along(self, tokens: mx.array) -> mx.array:
        """Counts [k + 1, V] behind 0 ... k of the tokens [k]."""
        rows = [self.counts]
        for token in tokens if self.adjust else []:
            rows.append(self.after(rows[-1], token[None]))
        return mx.concatenate(rows)

    def logits(self, logits: mx.array, counts: mx.array) -> mx.array:
        """What tokens are drawn from, float32 [k, V], by logits [k, W] of a model.

        A model may have more or fewer rows in its head than the target: those that
        are not in both are never drawn.
        """
        width = min(logits.shape[-1], self.vocabulary)
        logits = logits[:, :width].astype(mx.float32)
        if width < self.vocabulary:
            missing = self.vocabulary - width
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
        if self.adjust:
            logits = self.adjust(logits, counts)
        return logits if self.is_greedy else filter_logits(logits, self.sampling)
