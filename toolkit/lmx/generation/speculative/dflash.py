"""The proposer of a DFlash drafter: one pass drafts all tokens of a round."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer

# Hidden states that the drafter processes at once.
STEP_SIZE = 512


class DFlashProposer(HiddenStateProposer):
    """Proposes draft tokens from the hidden states of the target's cache.

    Every draft token is sampled from the distribution of its own slot, independent of
    the other ones.
    """

    # Position of the next token whose hidden states are read. It only grows: the hidden
    # states of rejected draft tokens were removed before the next round.
    _end = 0

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft: at most as many tokens as the drafter's block has."""
        count = min(num_draft_tokens, self._drafter.max_draft_tokens)
        anchor = len(context) - 1
        assert self._recorded.end == anchor
        self._read_states()
        if not count or not self._end:
            return NO_DRAFT
        hidden = self._drafter.draft_block(context[-1], anchor, self._cache, count)
        logits = self._drafter.target_logits(self._drafter.head(hidden))
        rows = iter(mx.split(logits, count))
        return self._draft(context, count, sampler, lambda _: next(rows))

    def _read_states(self) -> None:
        """Process the hidden states of all tokens since the last round.

        Those of a prefix that was cached without them are left out.
        """
        recorded = self._recorded
        start = max(self._end, recorded.start)
        if start == recorded.end:
            return
        states = recorded.since(start)
        for first in range(0, states.shape[1], STEP_SIZE):
            piece = states[:, first : first + STEP_SIZE]
            self._drafter.extend_context(piece, start + first, self._cache)
            if states.shape[1] > STEP_SIZE:
                mx.eval([(cache.keys, cache.values) for cache in self._cache])
        self._end = recorded.end
