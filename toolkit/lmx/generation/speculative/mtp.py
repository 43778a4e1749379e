"""The MTP proposer: the model's own multi-token-prediction head drafts."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, HiddenStateProposer


class MTPProposer(HiddenStateProposer):
    """Proposes draft tokens with the head that a checkpoint carries, an `MTPHead`."""

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft, after the states of all positions since the last one."""
        head = self._drafter
        for _, tokens, states in self._unread(context):
            inputs = head.target_states(states)
            self._last = head(tokens, inputs, self._cache)[:, -1:]
        if not num_draft_tokens or self._last is None:
            return NO_DRAFT
        return self._draft_in_turn(
            context, num_draft_tokens, sampler, head, head.logits
        )
