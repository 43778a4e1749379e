"""Draft models and drafters, as the benchmark and the cost model use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..generation.kv_cache.sequence import CacheState, RecordedStates
from ..generation.sampler import Sampler
from ..generation.sampling import Sampling
from ..generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from ..generation.speculative.factory import drafter_proposer
from ..generation.speculative.proposer import Proposer
from ..models.drafters.base import Drafter
from ..models.hooks import forward_with_hidden_states
from .acceptance import ReferenceCompletion

# Most draft tokens of a round that are measured.
MAX_DRAFT_TOKENS = 8
# Rounds whose logits exist at once.
ROUNDS_PER_CHUNK = 64


@dataclass(frozen=True)
class ModelCandidate:
    """A draft model: it maps tokens [B, L] and a list of caches to logits."""

    model: Any
    max_draft_tokens: int = MAX_DRAFT_TOKENS

    def make_proposer(self, cache: CacheState) -> Proposer:
        """The proposer of one completion; see `MakeProposer`."""
        return DraftModelProposer(DraftModelBatch(self.model))

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        """Acceptance probabilities [L, K] of the draft tokens of all rounds.

        See `ReferenceCompletion.probs_of_logits`; K is `max_draft_tokens`. A draft
        model that has accepted draft tokens predicts the next one as if it had not
        drafted them.
        """
        first = len(completion.prompt) - 1
        logits = self.model(completion.all_tokens)[0, first:-1]
        probs = completion.probs_of_logits(logits[:, None])[:, 0]
        padded = np.pad(probs, (0, self.max_draft_tokens))
        columns = np.arange(self.max_draft_tokens)
        return padded[np.arange(len(probs))[:, None] + columns]

    def prefill(self, num_tokens: int) -> None:
        """Process a new prompt of this length, and wait for the result."""
        tokens = mx.zeros((1, num_tokens), mx.int32)
        mx.eval(CacheState(self.model).forward(tokens))


@dataclass(frozen=True)
class DrafterCandidate:
    """A drafter on hidden states, with its target. Methods as of `ModelCandidate`."""

    drafter: Drafter
    target: Any

    @property
    def max_draft_tokens(self) -> int:
        """What it was trained for, if that is known."""
        return min(MAX_DRAFT_TOKENS, self.drafter.max_draft_tokens or MAX_DRAFT_TOKENS)

    def make_proposer(self, cache: CacheState) -> Proposer:
        return drafter_proposer(self.drafter, cache)

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        drafter, prompt, tokens = self.drafter, completion.prompt, completion.all_tokens
        count = self.max_draft_tokens
        _, states = forward_with_hidden_states(
            self.target, tokens[:, :-1], drafter.layer_ids
        )
        # A prompt of one token has no hidden states to read, so nothing is drafted.
        unread = int(len(prompt) == 1)
        starts = mx.arange(len(prompt) - 1 + unread, tokens.shape[1] - 1)
        probs = [np.zeros((unread, count))]
        for first in range(0, len(starts), ROUNDS_PER_CHUNK):
            chunk = starts[first : first + ROUNDS_PER_CHUNK]
            hidden = drafter.draft_hidden(tokens, states, chunk[None], count)[0]
            logits = drafter.target_logits(drafter.head(hidden))
            probs.append(completion.probs_of_logits(logits, first + unread))
        return np.concatenate(probs)

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


Candidate = ModelCandidate | DrafterCandidate


def all_acceptance_probs(
    completions: Sequence[ReferenceCompletion], candidate: Candidate
) -> list[np.ndarray]:
    """The acceptance probabilities of every completion with at least two tokens."""
    long = [completion for completion in completions if len(completion.tokens) > 1]
    return [candidate.acceptance_probs(completion) for completion in long]
