"""The proposer of a DFlash drafter: one pass drafts all tokens of a round."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer


class DFlashProposer(HiddenStateProposer):
    """Proposes draft tokens from the hidden states of the target's cache.

    Every draft token is sampled from the distribution of its own slot, independent of
    the other ones.
    """

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft: at most as many tokens as the drafter's block has."""
        count = min(num_draft_tokens, self._drafter.max_draft_tokens)
        anchor = len(context) - 1
        for start, _, states in self._unread(context):
            self._drafter.extend_context(states, start, self._cache)
        if not count or not self._end:
            return NO_DRAFT
        hidden = self._drafter.draft_block(context[-1], anchor, self._cache, count)
        logits = self._drafter.target_logits(self._drafter.head(hidden))
        rows = iter(mx.split(logits, count))
        return self._draft(context, count, sampler, lambda _: next(rows))
