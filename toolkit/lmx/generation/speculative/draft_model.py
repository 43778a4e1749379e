"""The draft-model proposer: a small model drafts one token after the other."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ...errors import UserError, nan_predictions
from ..kv_cache.batch import CacheBatch, OneRow, is_batchable, join, padded
from ..kv_cache.layer_rows import WINDOW_SLACK
from ..kv_cache.prefix import PrefixCache
from ..kv_cache.sequence import CacheState
from ..sampler import Sampler, sample_rows
from .proposer import (
    NO_DRAFT,
    DraftRequest,
    MakeProposer,
    Proposer,
    accepted_tokens,
    draft_tokens,
)

PREFILL_STEP_SIZE = 512
PREFIX_BYTES = 1 << 28
"""Memory for prefixes that the draft model has processed."""


def draft_model_proposer(model: Any) -> MakeProposer:
    """Makes the proposers of a model that has the target's tokenizer.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
    """
    if CacheState(model).has_states or not is_batchable(model):
        return lambda _: DraftModelProposer(model)
    shared = DraftModelBatch(model)
    return lambda _: DraftModelRow(shared)


class DraftModelRow(Proposer):
    """The proposer of one request in a `DraftModelBatch`."""

    def __init__(self, shared: "DraftModelBatch"):
        self.shared = shared
        # The tokens in the cache: the context, then draft tokens of the last round.
        self.context: list[int] = []
        self.drafted: mx.array = NO_DRAFT
        self.is_checked = False  # whether its first predictions are numbers

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """Launch the draft. It waits only for the draft tokens of the last round."""
        request = DraftRequest(self, context, num_draft_tokens, sampler)
        [draft] = self.shared.propose([request])
        if isinstance(draft, UserError):
            raise draft
        return draft

    def close(self) -> None:
        """Free the cache of the request."""
        self.shared.remove(self)


class DraftModelBatch:
    """Drafts for several requests at once with a model that has no recurrent states.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
    """

    def __init__(self, model: Any):
        self.model = model
        self._members: list[DraftModelRow] = []
        self._rows: OneRow | CacheBatch | None = None
        self._prefixes = PrefixCache(PREFIX_BYTES)

    def propose(self, requests: Sequence[DraftRequest]) -> list[mx.array | UserError]:
        """The draft tokens of every request, or the error of its proposer."""
        active = {r.proposer: r for r in requests if r.num_draft_tokens}
        if not active:
            return [NO_DRAFT] * len(requests)
        self._roll_back(active)
        for request in active.values():
            self._prefill(request)
        drafts = self._draft(active)
        return [drafts.get(request.proposer, NO_DRAFT) for request in requests]

    def remove(self, member: DraftModelRow) -> None:
        """Free the cache of a request."""
        if member not in self._members:
            return
        row = self._members.index(member)
        self._members[row] = self._members[-1]
        self._members.pop()
        if self._members:
            self._rows.leave(row)
        else:
            self._rows = None

    def _roll_back(self, active: dict[DraftModelRow, DraftRequest]) -> None:
        """Remove the rejected draft tokens from the cache."""
        counts = []
        for member in self._members:
            request = active.get(member)
            if request is None:
                counts.append(0)
                continue
            start, drafted = len(member.context), member.drafted.tolist()
            accepted = accepted_tokens(drafted, request.context[start:])
            # The last token of the context must be left to process.
            accepted = min(accepted, max(0, len(request.context) - 1 - start))
            counts.append(len(drafted) - accepted)
            member.context += drafted[:accepted]
            member.drafted = NO_DRAFT
        if any(counts):
            self._rows.trim(counts)

    def _prefill(self, request: DraftRequest) -> None:
        """Process a long context but for its last token; new requests join."""
        member, context = request.proposer, request.context
        if member in self._members:
            return
        # Turns of a chat and requests with one system prompt begin alike.
        state, _ = self._prefixes.fetch(context, partial(CacheState, self.model))
        tokens = mx.array([context[state.length : -1]], mx.int32)
        state.prefill(tokens, step_size=PREFILL_STEP_SIZE)
        member.context = list(context[:-1])
        self._prefixes.insert(member.context, state)
        self._members.append(member)
        self._rows = join(self._rows, state)

    def _draft(
        self, active: dict[DraftModelRow, DraftRequest]
    ) -> dict[DraftModelRow, mx.array | UserError]:
        """Launch the draft of every request."""
        rows = [*enumerate(self._members)]
        inputs, counts = self._unread(active)
        last = mx.array([max(0, count - 1) for count in counts])[:, None, None]
        drafting = [(row, active[m]) for row, m in rows if m in active]
        indices = mx.array([row for row, _ in drafting])
        seen = [request.sampler.counts for _, request in drafting]
        errors, drafted = {}, []
        for index in range(max(r.num_draft_tokens for _, r in drafting)):
            logits = self._rows.forward(inputs, counts)
            logits = mx.take_along_axis(logits, last, axis=1)[indices]
            if not index:
                errors = _errors([r.proposer for _, r in drafting], logits)
            samplers = [request.sampler for _, request in drafting]
            positions = [len(request.context) + index for _, request in drafting]
            tokens = sample_rows(samplers, logits, positions, seen)
            mx.async_eval(tokens)
            drafted.append(tokens)
            seen = [
                sampler.counts_after(before, token)
                for sampler, before, token in zip(samplers, seen, tokens, strict=True)
            ]
            inputs = mx.zeros((len(rows), 1), mx.int32)
            inputs[indices] = tokens
            last = mx.zeros((len(rows), 1, 1), mx.int32)
            counts = [int(member in active) for member in self._members]
        return self._drafts(drafting, mx.concatenate(drafted, axis=1)) | errors

    def _unread(
        self, active: dict[DraftModelRow, DraftRequest]
    ) -> tuple[mx.array, list[int]]:
        """The next inputs [B, N] and their numbers by row.

        After a time without drafts, those before the last ones are processed here.
        """
        unread = [
            active[m].context[len(m.context) :] if m in active else []
            for m in self._members
        ]
        # The rows of a sliding window take no more positions at once.
        early = [part[:-WINDOW_SLACK] for part in unread]
        for start in range(0, max(map(len, early)), WINDOW_SLACK):
            end = start + WINDOW_SLACK
            self._rows.forward(*padded([part[start:end] for part in early]))
        return padded([part[-WINDOW_SLACK:] for part in unread])

    def _drafts(
        self, drafting: Sequence[tuple[int, DraftRequest]], tokens: mx.array
    ) -> dict[DraftModelRow, mx.array]:
        drafts = {}
        for index, (_, request) in enumerate(drafting):
            member = request.proposer
            member.context = list(request.context)
            # The last draft token is not processed by the draft model.
            member.drafted = tokens[index, :-1]
            drafts[member] = tokens[index, : request.num_draft_tokens]
        return drafts


def _errors(
    members: Sequence[DraftModelRow], logits: mx.array
) -> dict[DraftModelRow, UserError]:
    """The errors of members whose first logits [1, V] of [B, 1, V] are NaN."""
    if all(member.is_checked for member in members):
        return {}
    error = nan_predictions("the draft model")
    broken = mx.isnan(logits).any(axis=(1, 2)).tolist()
    pairs = [*zip(members, broken, strict=True)]
    errors = {m: error for m, is_nan in pairs if is_nan and not m.is_checked}
    for member in members:
        member.is_checked = True
    return errors


class DraftModelProposer(Proposer):
    """Drafts for one request; the model may have recurrent states.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
    """

    def __init__(self, model: Any):
        self.model = model
        self._cache = CacheState(model)
        # The cache contains the context, then the draft tokens of the last round.
        self._context: list[int] = []
        self._draft_tokens: mx.array = NO_DRAFT
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
        drafted = self._draft_tokens.tolist()
        accepted = accepted_tokens(drafted, context[start:])
        # The last token of the context must be left to process.
        accepted = min(accepted, max(0, len(context) - 1 - start))
        self._cache.rollback(len(drafted) - accepted)
        self._context += drafted[:accepted]

    def _prefill(self, context: Sequence[int]) -> mx.array:
        """Process a long context but its last token; returns the next inputs."""
        unread = mx.array([context[len(self._context) :]], mx.int32)
        if unread.shape[1] > PREFILL_STEP_SIZE:
            self._cache.prefill(unread[:, :-1], step_size=PREFILL_STEP_SIZE)
            unread = unread[:, -1:]
        self._context = list(context)
        return unread
