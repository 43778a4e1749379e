"""The EAGLE-3 proposer: a drafter that reads the target's hidden states."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer


class Eagle3Proposer(HiddenStateProposer):
    """Proposes one draft token after the other with an EAGLE-3 drafter."""

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
        drafter = self._drafter
        for _, tokens, states in self._unread(context):
            self._last = drafter.read(tokens, states, self._cache)[:, -1:]
        return self._draft_in_turn(
            context,
            num_draft_tokens,
            sampler,
            drafter.step,
            lambda hidden: drafter.target_logits(drafter.head(hidden)),
        )

    def _can_draft(self, sampler: Sampler) -> bool:
        """Whether the draft vocabulary has a token that may be sampled."""
        allowed = sampler.sampling.allowed_tokens
        # The ids are made anew at every access, and few requests need them.
        if allowed is None or (draft_ids := self._drafter.draft_ids) is None:
            return True
        is_known = draft_ids[mx.array(allowed)] < self._drafter.draft_vocab_size
        return is_known.any().item()
