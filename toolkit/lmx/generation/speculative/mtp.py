"""The MTP proposer: the model's own multi-token-prediction head drafts."""

from collections.abc import Sequence

import mlx.core as mx

from ...models.drafters.mtp import MTPHead
from ..kv_cache.sequence import CacheState
from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer

STEP_SIZE = 512
"""Positions per forward pass of the head."""


class MTPProposer(HiddenStateProposer):
    """Proposes draft tokens with the head that a checkpoint carries."""

    _last: mx.array | None = None

    def __init__(self, head: MTPHead, cache: CacheState):
        super().__init__(head, cache)
        # The head's caches contain the target's states up to this position. The states
        # of draft tokens are removed after every round.
        self._end = cache.recorded.start

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft, after the states of all positions since the last one."""
        self._read(context)
        if not num_draft_tokens or self._last is None:
            return NO_DRAFT
        hidden = self._last

        def next_logits(token: mx.array | None) -> mx.array:
            nonlocal hidden
            if token is not None:
                hidden = self._drafter(token[None], hidden, self._cache)
            return self._drafter.logits(hidden[:, -1])

        draft = self._draft(context, num_draft_tokens, sampler, next_logits)
        for cache in self._cache:
            cache.trim(num_draft_tokens - 1)
        return draft

    def _read(self, context: Sequence[int]) -> None:
        """Process the target's new states, each with the token after its own."""
        recorded = self._recorded
        assert recorded.end == len(context) - 1
        if self._end == recorded.end:
            return
        states = recorded.since(self._end)
        tokens = mx.array([context[self._end + 1 :]], mx.int32)
        for start in range(0, tokens.shape[1], STEP_SIZE):
            part = slice(start, start + STEP_SIZE)
            inputs = self._drafter.target_states(states[:, part])
            self._last = self._drafter(tokens[:, part], inputs, self._cache)[:, -1:]
            if part.stop < tokens.shape[1]:
                mx.eval(self._last, [cache.state for cache in self._cache])
        self._end = recorded.end
