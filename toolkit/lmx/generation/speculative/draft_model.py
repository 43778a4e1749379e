"""The draft-model proposer: a small model drafts one token after the other."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..kv_cache.sequence import CacheState
from ..sampler import Sampler
from .proposer import NO_DRAFT, draft_tokens

PREFILL_STEP_SIZE = 512


class DraftModelProposer:
    """Proposes draft tokens with a model that has the target's tokenizer.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
    """

    def __init__(self, model: Any):
        self.model = model
        self._cache = CacheState(model)
        # The cache contains the context, then the draft tokens of the last round.
        self._context: list[int] = []
        self._draft_tokens: mx.array = mx.zeros(0, mx.int32)
        self._is_first = True

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft. It waits only for the draft tokens of the last round."""
        if not num_draft_tokens:
            return NO_DRAFT
        self._rollback(context)
        inputs = self._prefill(context)

        def next_logits(token: mx.array | None) -> mx.array:
            if token is None:
                logits = self._cache.forward(inputs)[:, -1]
                self._cache.checkpoint()
                return logits
            return self._cache.forward(token[None])[:, -1]

        draft = draft_tokens(
            context, num_draft_tokens, sampler, next_logits, is_first=self._is_first
        )
        self._is_first = False
        # The last draft token is not processed by the draft model.
        self._draft_tokens = draft[:-1]
        return draft

    def _rollback(self, context: Sequence[int]) -> None:
        """Remove the rejected draft tokens from the cache."""
        start = len(self._context)
        draft_tokens = self._draft_tokens.tolist()
        accepted = 0
        for draft_token, token in zip(draft_tokens, context[start:], strict=False):
            if draft_token != token:
                break
            accepted += 1
        # The last token of the context must be left to process.
        accepted = min(accepted, max(0, len(context) - 1 - start))
        self._cache.rollback(len(draft_tokens) - accepted)
        self._context += draft_tokens[:accepted]

    def _prefill(self, context: Sequence[int]) -> mx.array:
        """Process a long context but its last token; returns the next inputs."""
        unread = mx.array([context[len(self._context) :]], mx.int32)
        if unread.shape[1] > PREFILL_STEP_SIZE:
            self._cache.prefill(unread[:, :-1], step_size=PREFILL_STEP_SIZE)
            unread = unread[:, -1:]
        self._context = list(context)
        return unread
