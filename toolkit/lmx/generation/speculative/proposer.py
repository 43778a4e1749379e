"""The interface of draft-token proposers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ...errors import UserError, nan_predictions
from ..kv_cache.sequence import CacheState
from ..sampler import Sampler

# From values, not `mx.zeros`: that would be computed on the stream of the thread that
# imports this module, which other threads do not have.
NO_DRAFT = mx.array([], mx.int32)
STEP_SIZE = 512
"""Tokens of a long prompt whose hidden states a drafter reads at once."""


class Proposer(ABC):
    """Proposes draft tokens for one request. It must not change the target's output.

    A proposer gets no feedback on acceptance: the next context contains the accepted
    draft tokens.

    Attributes:
        shared: proposes for several requests at once; None = it cannot.
    """

    shared: "SharedProposer | None" = None

    @abstractmethod
    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """At most `num_draft_tokens` tokens that may follow the context, int32 [k].

        They may be lazy, and k may be 0.

        Args:
            context: all tokens of the prompt and the completion so far.
            sampler: of the request.

        Raises:
            UserError: the first predictions are NaN. It must not propose again.
        """

    def close(self) -> None:  # noqa: B027
        """Free what the request needed. It ends."""


@dataclass(frozen=True)
class DraftRequest:
    """What `Proposer.propose` gets, for one request of several."""

    proposer: Proposer
    context: Sequence[int]
    num_draft_tokens: int
    sampler: Sampler


class SharedProposer(Protocol):
    """Proposes draft tokens for several requests at once."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[mx.array | UserError]:
        """The draft tokens of every request, or the error of its proposer."""
        ...


def propose(requests: Sequence[DraftRequest]) -> list[mx.array | UserError]:
    """The draft tokens of every request, together where their proposers can.

    Returns:
        Tokens as from `Proposer.propose`, or what is wrong with the draft model.
    """
    drafts: list[mx.array | UserError] = [NO_DRAFT] * len(requests)
    shared: dict[SharedProposer, list[int]] = {}
    for index, request in enumerate(requests):
        if request.proposer.shared:
            shared.setdefault(request.proposer.shared, []).append(index)
        else:
            try:
                drafts[index] = request.proposer.propose(
                    request.context, request.num_draft_tokens, request.sampler
                )
            except UserError as error:
                drafts[index] = error
    for proposer, indices in shared.items():
        together = proposer.propose([requests[index] for index in indices])
        for index, draft in zip(indices, together, strict=True):
            drafts[index] = draft
    return drafts


MakeProposer = Callable[[CacheState], Proposer]
"""Makes the proposer of one completion from the target's cache."""


def accepted_tokens(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of draft tokens before the first that is not the token."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    different = (index for index, (a, b) in pairs if a != b)
    return next(different, min(len(draft), len(tokens)))


def draft_tokens(
    context: Sequence[int],
    count: int,
    sampler: Sampler,
    next_logits: Callable[[mx.array | None], mx.array],
    *,
    is_first: bool,
) -> mx.array:
    """Launch a draft of `count` tokens, at least one, one after the other.

    They are sampled with the settings and the noise of the request.

    Args:
        next_logits: logits [1, V] after a draft token int32 [1]; None = after the
            context.
        is_first: check the first logits.

    Raises:
        UserError: the first logits are NaN.
    """
    counts, tokens = sampler.counts, []
    for index in range(count):
        logits = next_logits(tokens[-1] if tokens else None)
        if is_first and not index and mx.isnan(logits).any().item():
            raise nan_predictions("the draft model")
        token = sampler.sample(logits, [len(context) + index], counts)
        mx.async_eval(token)
        tokens.append(token)
        # Penalties depend on the draft tokens before.
        counts = sampler.counts_after(counts, token)
    return mx.concatenate(tokens)


class HiddenStateProposer(Proposer):
    """Base class of proposers that read hidden states of the target.

    Args:
        drafter: bound to the target.
        cache: of the completion. From here on, it records hidden states; tokens whose
            states are not known are not read.
    """

    # Position of the next token whose hidden states are read. It only grows: those of
    # rejected draft tokens were removed before the next round.
    _end = 0

    def __init__(self, drafter: Any, cache: CacheState):
        cache.record_hidden_states(drafter.layer_ids)
        self._drafter, self._recorded = drafter, cache.recorded
        self._cache = drafter.make_cache()
        self._is_first = True
        self._last: mx.array | None = None  # output for the last token that was read

    def _unread(
        self, context: Sequence[int]
    ) -> Iterator[tuple[int, mx.array, mx.array]]:
        """The hidden states since the last round, in pieces of `STEP_SIZE`.

        Yields:
            The position of the first token, the token after every one, int32 [1, n],
            and the states [1, n, width].
        """
        recorded = self._recorded
        assert recorded.end == len(context) - 1
        start = max(self._end, recorded.start)
        if start == recorded.end:
            return
        self._end = recorded.end
        states = recorded.since(start)
        tokens = mx.array([context[start + 1 :]], mx.int32)
        for first in range(0, tokens.shape[1], STEP_SIZE):
            if first:
                mx.eval([cache.state for cache in self._cache])
            part = slice(first, first + STEP_SIZE)
            yield start + first, tokens[:, part], states[:, part]

    def _draft(self, context, count: int, sampler: Sampler, next_logits) -> mx.array:
        is_first, self._is_first = self._is_first, False
        return draft_tokens(context, count, sampler, next_logits, is_first=is_first)

    def _draft_in_turn(
        self, context, count: int, sampler: Sampler, step: Callable, logits: Callable
    ) -> mx.array:
        """Launch draft tokens that are predicted one after the other.

        Args:
            step: the output of a token, of the output before it and the caches.
            logits: of an output [1, width].
        """
        hidden = self._last

        def next_logits(token: mx.array | None) -> mx.array:
            nonlocal hidden
            if token is not None:
                hidden = step(token[None], hidden, self._cache)
            return logits(hidden[:, -1])

        draft = self._draft(context, count, sampler, next_logits)
        # Even if they are accepted: then their rows have the target's states.
        for cache in self._cache:
            cache.trim(count - 1)
        return draft
