"""Prompt lookup decoding: continuations of earlier n-grams are the draft.

They come from the request's own text and from all earlier requests, as in
SuffixDecoding (arXiv 2411.04975).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, Proposer

NGRAM_SIZES = 2, 1
"""Tokens of the n-grams in the index; a longer match is found by its last ones."""
MAX_INDEX_TOKENS = 1 << 18
# The most recent occurrences that are compared, and the tokens compared at each.
MAX_MATCHES, MAX_MATCH_LENGTH = 32, 64
PRIOR = 2.0
"""Weight of other tokens than those seen, after a match of one token."""
MIN_PROBABILITY = 0.3
"""Less probable draft tokens cost more than they gain."""


class PromptLookupProposer(Proposer):
    """Looks up the last tokens in an n-gram index that includes the current text.

    Args:
        index: contains the texts of earlier requests; None = a new index.
        min_probability: no draft if its first token is less probable.
    """

    def __init__(
        self,
        index: "NGramIndex | None" = None,
        *,
        min_probability: float = MIN_PROBABILITY,
    ):
        self._index = index or NGramIndex()
        self._text_id = self._index.add_text()
        self._min_probability = min_probability

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """The best continuation, at most `num_draft_tokens` tokens."""
        self._index.extend(self._text_id, context)
        found = self._index.continuation(self._text_id, context, num_draft_tokens)
        if not found.tokens or found.probabilities[0] < self._min_probability:
            return NO_DRAFT
        return mx.array(found.tokens, mx.int32)


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow a context.

    Attributes:
        probabilities: that a token and all before it follow, as far as counts tell.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    @property
    def expected_accepted(self) -> float:
        """The expected number of accepted tokens."""
        return sum(self.probabilities)


@dataclass(frozen=True)
class _Match:
    """A place in a text where the last `length` tokens of the context occur."""

    text: Sequence[int]
    end: int
    length: int

    def token(self, index: int) -> int | None:
        """The token with this index after the match; None = the text ends before."""
        position = self.end + index
        return self.text[position] if position < len(self.text) else None


class NGramIndex:
    """Token sequences and the most recent positions of all their n-grams.

    Args:
        max_tokens: tokens in the index. The oldest texts are removed first, the newest
            is always kept.
    """

    def __init__(self, max_tokens: int = MAX_INDEX_TOKENS):
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: dict[int, list[int]] = {}
        self._positions: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._last_id = 0

    def add_text(self) -> int:
        """Add an empty text; returns its id."""
        self._last_id += 1
        self._texts[self._last_id] = []
        return self._last_id

    def extend(self, text_id: int, tokens: Sequence[int]) -> None:
        """Set a text to all of `tokens`, which extend it. Removed texts are ignored."""
        if text_id not in self._texts:
            return
        text = self._texts[text_id]
        start = len(text)
        text.extend(tokens[start:])
        self._num_tokens += len(text) - start
        # An n-gram is indexed when a token follows it.
        for end in range(max(1, start), len(text)):
            for ngram in _ngrams(text, end):
                positions = self._positions.setdefault(ngram, [])
                positions.append((text_id, end))
                if len(positions) > 2 * MAX_MATCHES:
                    del positions[:MAX_MATCHES]
        while self._num_tokens > self._max_tokens and len(self._texts) > 1:
            self._remove(next(iter(self._texts)))

    def continuation(
        self, text_id: int, context: Sequence[int], count: int
    ) -> Continuation:
        """At most `count` tokens after matches of the end of the context.

        The text's own matches and those in other texts are counted apart.
        """
        own, others = [], []
        for other_id, end in self._candidates(context):
            text = self._texts[other_id]
            match = _Match(text, end, _match_length(text, end, context))
            (own if other_id == text_id else others).append(match)
        found = [_best_continuation(matches, count) for matches in (own, others)]
        return max(found, key=lambda c: c.expected_accepted)

    def _candidates(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Positions of the last n-grams, those of long ones first, then the latest."""
        found: dict[tuple[int, int], None] = {}
        for ngram in _ngrams(context, len(context)):
            positions = self._positions.get(ngram, [])[-MAX_MATCHES:]
            found |= dict.fromkeys(reversed(positions))
            if len(found) >= MAX_MATCHES:
                break
        return list(found)[:MAX_MATCHES]

    def _remove(self, text_id: int) -> None:
        text = self._texts.pop(text_id)
        self._num_tokens -= len(text)
        for ngram in {n for end in range(1, len(text)) for n in _ngrams(text, end)}:
            positions = [p for p in self._positions.get(ngram, []) if p[0] != text_id]
            if positions:
                self._positions[ngram] = positions
            else:
                self._positions.pop(ngram, None)


def _ngrams(tokens: Sequence[int], end: int) -> list[tuple[int, ...]]:
    """The n-grams before position `end`."""
    return [tuple(tokens[end - size : end]) for size in NGRAM_SIZES if size <= end]


def _match_length(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """The number of tokens before `end` that equal the end of the context."""
    length = 0
    limit = min(end, len(context), MAX_MATCH_LENGTH)
    while length < limit and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length


def _best_continuation(matches: Sequence[_Match], count: int) -> Continuation:
    """The continuation with the most expected tokens, over all match lengths.

    Long matches predict better, short ones are more.
    """
    lengths = sorted({match.length for match in matches}, reverse=True)
    found = [
        _continuation([m for m in matches if m.length >= length], length, count)
        for length in lengths
    ]
    return max(found, key=lambda c: c.expected_accepted, default=Continuation())


def _continuation(matches: Sequence[_Match], length: int, count: int) -> Continuation:
    """The most frequent token after the matches, then the one after that, and so on."""
    result, probability = Continuation(), 1.0
    for index in range(count):
        counts: dict[int, int] = {}
        for match in matches:
            if (token := match.token(index)) is not None:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            break
        # Among equally frequent tokens, the most recent one.
        best = max(counts, key=counts.__getitem__)
        # The longer the match, the less probable are tokens that never followed it.
        unseen = PRIOR / (length + index)
        probability *= counts[best] / (sum(counts.values()) + unseen)
        if probability < MIN_PROBABILITY:
            break
        result.tokens.append(best)
        result.probabilities.append(probability)
        matches = [match for match in matches if match.token(index) == best]
    return result
