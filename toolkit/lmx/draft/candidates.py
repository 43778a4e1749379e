"""Draft models and drafters, as the benchmark and the cost model use them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..generation.kv_cache.recorded_states import RecordedStates
from ..generation.kv_cache.sequence import CacheState
from ..generation.sampler import Sampler
from ..generation.sampling import Sampling
from ..generation.speculative.draft_model import DraftModelProposer
from ..generation.speculative.factory import drafter_proposer
from ..generation.speculative.proposer import Proposer
from ..models.drafters.base import Drafter
from ..models.hooks import find_blocks
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

    def draft_bytes(self, num_draft_tokens: int) -> int:
        """Bytes of weights that are read to draft so many tokens, as served."""
        ...


@dataclass(frozen=True)
class ModelCandidate:
    """A draft model: it maps tokens [B, L] and a list of caches to logits."""

    model: Any
    max_draft_tokens: int = MAX_DRAFT_TOKENS

    def make_proposer(self, cache: CacheState) -> Proposer:
        return DraftModelProposer(self.model)

    def acceptance_probs(self, completion: ReferenceCompletion) -> np.ndarray:
        return completion.acceptance_probs(self.model)

    def prefill(self, num_tokens: int) -> None:
        tokens = mx.zeros((1, num_tokens), mx.int32)
        mx.eval(CacheState(self.model).forward(tokens))

    def draft_bytes(self, num_draft_tokens: int) -> int:
        return num_draft_tokens * decode_bytes(self.model)


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

    def draft_bytes(self, num_draft_tokens: int) -> int:
        passes = 1 if self.drafter.drafts_in_one_pass else num_draft_tokens
        size = _served_bytes(self.drafter.parameters())
        if self.drafter.draft_ids is None:
            size += _served_bytes(_head(self.target))
        return passes * size


def decode_bytes(model: nn.Module) -> int:
    """Bytes of weights that a model reads for one token, as served."""
    blocks = find_blocks(model)
    return _served_bytes(blocks.trunk[blocks.name]) + _served_bytes(_head(model))


def _head(model: nn.Module) -> dict:
    """The weights outside the blocks that make the logits: the head, or a tied one."""
    prefix = find_blocks(model).prefix
    outside = {
        name: value
        for name, value in tree_flatten(model.parameters())
        if not name.startswith(prefix)
    }
    head = {name: value for name, value in outside.items() if "head" in name}
    return head or outside


def _served_bytes(weights: dict | list) -> int:
    """Floating-point weights count as 16 bits, though a CPU computes in float32."""
    return sum(
        2 * value.size if mx.issubdtype(value.dtype, mx.floating) else value.nbytes
        for _, value in tree_flatten(weights)
    )


def all_acceptance_probs(
    completions: Sequence[ReferenceCompletion], candidate: Candidate
) -> list[np.ndarray]:
    """The acceptance probabilities of every completion with at least two tokens."""
    return [
        candidate.acceptance_probs(completion)[:, : candidate.max_draft_tokens]
        for completion in completions
        if len(completion.tokens) > 1
    ]
