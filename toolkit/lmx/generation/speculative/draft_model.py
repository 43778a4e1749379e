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
from .proposer import NO_DRAFT, DraftRequest, MakeProposer, Proposer, accepted_tokens

PREFILL_STEP_SIZE = 512
PREFIX_BYTES = 1 << 28
"""Memory for prefixes that the draft model has processed."""


def draft_model_proposer(model: Any) -> MakeProposer:
    """Makes the proposers of a model that has the target's tokenizer.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
    """
    if CacheState(model).has_states or not is_batchable(model):
        return lambda _: DraftModelProposer(DraftModelBatch(model))
    shared = DraftModelBatch(model, PrefixCache(PREFIX_BYTES))
    return lambda _: DraftModelProposer(shared)


class DraftModelProposer(Proposer):
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
    """Drafts for several requests at once, or for one with a model of any kind.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V]. For several
            requests it is batchable, and has no recurrent states.
        prefixes: what requests begin with alike is processed once.
    """

    def __init__(self, model: Any, prefixes: PrefixCache | None = None):
        self.model = model
        self._members: list[DraftModelProposer] = []
        self._rows: OneRow | CacheBatch | None = None
        self._prefixes = prefixes

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

    def remove(self, member: DraftModelProposer) -> None:
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

    def _roll_back(self, active: dict[DraftModelProposer, DraftRequest]) -> None:
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
        new_state = partial(CacheState, self.model)
        state = new_state()
        if self._prefixes:
            # Turns of a chat and requests with one system prompt begin alike.
            state, _ = self._prefixes.fetch(context, new_state)
        tokens = mx.array([context[state.length : -1]], mx.int32)
        state.prefill(tokens, step_size=PREFILL_STEP_SIZE)
        member.context = list(context[:-1])
        if self._prefixes:
            self._prefixes.insert(member.context, state)
        self._members.append(member)
        self._rows = join(self._rows, state)

    def _draft(
        self, active: dict[DraftModelProposer, DraftRequest]
    ) -> dict[DraftModelProposer, mx.array | UserError]:
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
                self._rows.checkpoint()
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
            is_active = [int(member in active) for member in self._members]
            counts = None if all(is_active) else is_active
        return self._drafts(drafting, mx.concatenate(drafted, axis=1)) | errors

    def _unread(
        self, active: dict[DraftModelProposer, DraftRequest]
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
    ) -> dict[DraftModelProposer, mx.array]:
        drafts = {}
        for index, (_, request) in enumerate(drafting):
            member = request.proposer
            member.context = list(request.context)
            # The last draft token is not processed by the draft model.
            member.drafted = tokens[index, :-1]
            drafts[member] = tokens[index, : request.num_draft_tokens]
        return drafts


def _errors(
    members: Sequence[DraftModelProposer], logits: mx.array
) -> dict[DraftModelProposer, UserError]:
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
