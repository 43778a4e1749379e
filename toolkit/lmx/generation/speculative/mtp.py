"""The MTP proposer: the model's own multi-token-prediction head drafts."""

from collections.abc import Sequence

import mlx.core as mx

from ...models.drafters.mtp import MTPHead
from ..kv_cache import CacheState
from .proposer import NO_DRAFT, DraftTokens, TargetSampler

STEP_SIZE = 512
"""Positions per forward pass of the head."""


class MTPProposer:
    """Proposes draft tokens with the head that a checkpoint carries.

    Args:
        cache: the target's. Its hidden states are recorded from here on.
        sampled: sample draft tokens with the target's settings; otherwise draft
            greedily.
        seed: seed of the draft samples, independent of the target's.
    """

    def __init__(
        self, head: MTPHead, cache: CacheState, *, sampled: bool = True, seed: int = 0
    ):
        cache.record_hidden_states([head.layer_id])
        self._head, self._target = head, cache
        self._sampled = sampled
        self._key = mx.random.key(seed ^ 0x317B)
        # The head's caches contain the target's states up to this position. The states
        # of draft tokens are removed after every round.
        self._caches, self._end = head.make_cache(), cache.recorded.start
        self._last: mx.array | None = None

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: TargetSampler
    ) -> DraftTokens:
        """Launch the draft, after the states of all positions since the last one."""
        self._read(context)
        if not num_draft_tokens or self._last is None:
            return NO_DRAFT
        hidden, counts, logits_used, tokens = self._last, sampler.counts, [], []
        for position in range(num_draft_tokens):
            if position:
                hidden = self._head(tokens[-1][None], hidden, self._caches)
            logits = sampler.process(self._head.logits(hidden[:, -1]), counts)
            token = self._sample(logits, sampler)
            mx.async_eval(token)
            logits_used.append(logits)
            tokens.append(token)
            counts = sampler.counts_after(counts, token)
        for cache in self._caches:
            cache.trim(num_draft_tokens - 1)
        draft_tokens = mx.concatenate(tokens)
        if sampler.is_greedy or not self._sampled:
            return DraftTokens(draft_tokens)
        return DraftTokens(draft_tokens, mx.concatenate(logits_used))

    def _read(self, context: Sequence[int]) -> None:
        """Process the target's new states, each with the token after its own."""
        recorded = self._target.recorded
        assert recorded.end == len(context) - 1
        if self._end == recorded.end:
            return
        states = recorded.since(self._end)
        tokens = mx.array([context[self._end + 1 :]], mx.int32)
        for start in range(0, tokens.shape[1], STEP_SIZE):
            part = slice(start, start + STEP_SIZE)
            inputs = self._head.target_states(states[:, part])
            self._last = self._head(tokens[:, part], inputs, self._caches)[:, -1:]
            if part.stop < tokens.shape[1]:
                mx.eval(self._last, [cache.state for cache in self._caches])
        self._end = recorded.end

    def _sample(self, logits: mx.array, sampler: TargetSampler) -> mx.array:
        if sampler.is_greedy or not self._sampled:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        self._key, subkey = mx.random.split(self._key)
        return mx.random.categorical(logits, key=subkey).astype(mx.int32)
