"""The EAGLE-3 proposer: a drafter that reads the target's hidden states."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer

READ_STEP_SIZE = 512
"""Rows of a long prompt that the drafter reads at once."""


class Eagle3Proposer(HiddenStateProposer):
    """Proposes one draft token after the other with an EAGLE-3 drafter."""

    # The next position to read; None = nothing was read.
    _position: int | None = None

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft. It waits for nothing."""
        limit = self._drafter.max_draft_tokens or num_draft_tokens
        num_draft_tokens = min(num_draft_tokens, limit)
        recorded = self._recorded
        if not num_draft_tokens or recorded.start == recorded.end:
            return NO_DRAFT
        if not self._can_draft(sampler):
            return NO_DRAFT
        hidden = self._read(context)

        def next_logits(token: mx.array | None) -> mx.array:
            nonlocal hidden
            if token is not None:
                hidden = self._drafter.step(token[None], hidden, self._cache)
            return self._drafter.target_logits(self._drafter.head(hidden[:, -1]))

        draft = self._draft(context, num_draft_tokens, sampler, next_logits)
        # Even if they are accepted: then their rows have the target's states.
        for layer_cache in self._cache:
            layer_cache.trim(num_draft_tokens - 1)
        return draft

    def _can_draft(self, sampler: Sampler) -> bool:
        """Whether the draft vocabulary has a token that may be sampled."""
        allowed = sampler.sampling.allowed_tokens
        # The ids are made anew at every access, and few requests need them.
        if allowed is None or (draft_ids := self._drafter.draft_ids) is None:
            return True
        is_known = draft_ids[mx.array(allowed)] < self._drafter.draft_vocab_size
        return is_known.any().item()

    def _read(self, context: Sequence[int]) -> mx.array:
        """Read all rows up to the end of the context; returns the last output."""
        recorded = self._recorded
        if self._position is None:
            self._position = recorded.start
        states = recorded.since(self._position)
        tokens = mx.array([context[self._position + 1 :]], mx.int32)
        assert tokens.shape[1] == states.shape[1]
        self._position = recorded.end
        for start in range(0, tokens.shape[1], READ_STEP_SIZE):
            if start:
                mx.eval([layer_cache.state for layer_cache in self._cache])
            end = start + READ_STEP_SIZE
            hidden = self._drafter.read(
                tokens[:, start:end], states[:, start:end], self._cache
            )
        return hidden[:, -1:]
