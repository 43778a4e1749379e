"""A small model guesses, one token after the other."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..decode_loop import prefill
from ..kv_cache import CacheState
from .proposer import NO_DRAFT, DraftTokens, TargetSampler

PREFILL_STEP = 512


class DraftModelProposer:
    """Drafts with a model that has the target's tokens.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        sampled: draw guesses as the target draws its tokens; else always guess the most
            likely one. Both are lossless; which stands more often depends on the pair.
        seed: of the draws, apart from the target's.
    """

    def __init__(self, model: Any, *, sampled: bool = True, seed: int = 0):
        self.model = model
        self._sampled = sampled
        self._key = mx.random.key(seed ^ 0x5BEC)
        self._session = CacheState(model)
        # What the session has read: context, then guesses.
        self._context: list[int] = []
        self._guesses: mx.array = mx.zeros(0, mx.int32)

    def propose(
        self, context: Sequence[int], count: int, choice: TargetSampler
    ) -> DraftTokens:
        """Guess; nothing is waited for but the guesses of the round before."""
        if not count:
            return NO_DRAFT
        self._return_to(context)
        counts, drawn_from, guesses = choice.counts, [], []
        token = self._caught_up(context)
        for number in range(count):
            if number == 1:
                self._session.checkpoint()
            logits = choice.logits(self._session.forward(token)[:, -1], counts)
            guess = self._chosen(logits, choice)
            mx.async_eval(guess)
            drawn_from.append(logits)
            guesses.append(guess)
            counts = choice.after(counts, guess)
            token = guess[None]
        if count == 1:
            self._session.checkpoint()
        # The last guess is not read.
        tokens = mx.concatenate(guesses).astype(mx.int32)
        self._guesses = tokens[:-1]
        is_drawn = self._sampled and not choice.is_greedy
        return DraftTokens(tokens, mx.concatenate(drawn_from) if is_drawn else None)

    def _return_to(self, context: Sequence[int]) -> None:
        """Take back the guesses that did not stand."""
        start = len(self._context)
        guesses = self._guesses.tolist()
        follows = list(context[start : start + len(guesses)])
        stays = 0
        while stays < len(follows) and follows[stays] == guesses[stays]:
            stays += 1
        # The last token of the context is always left to be read.
        stays = min(stays, max(0, len(context) - 1 - start))
        self._session.rollback(len(guesses) - stays)
        self._context += guesses[:stays]

    def _caught_up(self, context: Sequence[int]) -> mx.array:
        """Read the context but its last tokens, which are to be read next."""
        unread = mx.array([context[len(self._context) :]], mx.int32)
        if unread.shape[1] > PREFILL_STEP:
            prefill(self._session, unread[:, :-1], width=PREFILL_STEP)
            unread = unread[:, -1:]
        self._context = list(context)
        return unread

    def _chosen(self, logits: mx.array, choice: TargetSampler) -> mx.array:
        if choice.is_greedy or not self._sampled:
            return mx.argmax(logits, axis=-1)
        self._key, now = mx.random.split(self._key)
        return mx.random.categorical(logits, key=now)
