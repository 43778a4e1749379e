"""Draft models and drafters, as the benchmark and the cost model use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..generation.kv_cache.sequence import CacheState, RecordedStates
from ..generation.sampler import Sampler
from ..generation.sampling import Sampling
from ..generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from ..generation.speculative.factory import drafter_proposer
from ..generation.speculative.proposer import Proposer
from ..models.drafters.base import Drafter
from .acceptance import MAX_DRAFT_TOKENS, ReferenceCompletion


class Candidate(Protocol):
    """Something that drafts tokens for a target.

    Attributes:
        max_draft_tokens: most draft tokens of a round that are measured.
    """

    max_draft_tokens: int

    def make_proposer(self, cache: CacheState) -> Proposer:
        """The proposer of one completion; see `MakeProposer`."""
        ...

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        """Acceptance probabilities [L, K], K >= `max_draft_tokens`."""
        ...

    def prefill(self, num_tokens: int) -> None:
        """Process a new prompt of this length, and wait for the result."""
        ...


@dataclass(frozen=True)
class ModelCandidate:
    """A draft model: it maps tokens [B, L] and a list of caches to logits."""

    model: Any
    max_draft_tokens: int = MAX_DRAFT_TOKENS

    def make_proposer(self, cache: CacheState) -> Proposer:
        return DraftModelProposer(DraftModelBatch(self.model))

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        return completion.acceptance_probs(self.model)

    def prefill(self, num_tokens: int) -> None:
        tokens = mx.zeros((1, num_tokens), mx.int32)
        mx.eval(CacheState(self.model).forward(tokens))


@dataclass(frozen=True)
class DrafterCandidate:
    """A drafter on hidden states, with its target."""

    drafter: Drafter
    target: Any

    @property
    def max_draft_tokens(self) -> int:
        """What it was trained for, if that is known."""
        return min(MAX_DRAFT_TOKENS, self.drafter.max_draft_tokens or MAX_DRAFT_TOKENS)

    def make_proposer(self, cache: CacheState) -> Proposer:
        return drafter_proposer(self.drafter, cache)

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        return completion.drafter_acceptance_probs(self.drafter)

    def prefill(self, num_tokens: int) -> None:
        # The proposer reads nothing else of a cache than the hidden states.
        cache = CacheState(self.target)
        cache.record_hidden_states(self.drafter.layer_ids)
        cache.forward(mx.zeros((1, 1), mx.int32))
        width = cache.recorded.since(0).shape[-1]
        cache.recorded = RecordedStates(cache.recorded.layer_ids, 0)
        proposer = self.make_proposer(cache)
        cache.recorded.append(mx.zeros((1, num_tokens, width)))
        context = [0] * (num_tokens + 1)
        sampler = Sampler(Sampling(), context, self.drafter.draft_vocab_size)
        mx.eval(proposer.propose(context, 1, sampler))


def all_acceptance_probs(
    completions: Sequence[ReferenceCompletion], candidate: Candidate
) -> list[np.ndarray]:
    """The acceptance probabilities of every completion with at least two tokens."""
    return [
        candidate.acceptance_probs(completion)[:, : candidate.max_draft_tokens]
        for completion in completions
        if len(completion.tokens) > 1
    ]
