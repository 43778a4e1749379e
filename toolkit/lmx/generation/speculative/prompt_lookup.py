"""Prompt lookup decoding: the continuation of an earlier n-gram is the draft."""

from collections.abc import Sequence

import mlx.core as mx

from ..sampler import Sampler
from .proposer import NO_DRAFT, Proposer

NGRAM_SIZE = 3
MAX_INDEX_TOKENS = 1 << 20
# The most recent occurrences that are compared, and the tokens compared at each.
MAX_CANDIDATES, MAX_MATCH = 32, 64


class PromptLookupProposer(Proposer):
    """Looks up the last tokens in an n-gram index that includes the current text.

    The longest match wins; among equally long matches, the most recent one. Like
    arXiv 2411.04975, the index may also contain earlier completions.

    Args:
        index: contains the texts of earlier requests; None = a new index.
    """

    def __init__(self, index: "NGramIndex | None" = None):
        self._index = index or NGramIndex()
        self._text_id = self._index.add_text()

    def propose(
        self, context: Sequence[int], num_draft_tokens: int, sampler: Sampler
    ) -> mx.array:
        """The continuation of the longest match, at most `num_draft_tokens` tokens."""
        self._index.extend(self._text_id, context)
        tokens = self._index.continuation(context, num_draft_tokens)
        return mx.array(tokens, mx.int32) if tokens else NO_DRAFT


class NGramIndex:
    """Token sequences and the positions of all their n-grams.

    Args:
        ngram_size: tokens of an n-gram: the minimum length of a match.
        max_tokens: tokens in the index. The oldest texts are removed first, the newest
            is always kept.
    """

    def __init__(
        self, ngram_size: int = NGRAM_SIZE, max_tokens: int = MAX_INDEX_TOKENS
    ):
        assert ngram_size > 0
        self._ngram_size = ngram_size
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
        text, n = self._texts[text_id], self._ngram_size
        start = len(text)
        text.extend(tokens[start:])
        self._num_tokens += len(text) - start
        # An n-gram is indexed when a token follows it.
        for end in range(max(n, start), len(text)):
            ngram = tuple(text[end - n : end])
            self._positions.setdefault(ngram, []).append((text_id, end))
        while self._num_tokens > self._max_tokens and len(self._texts) > 1:
            self._remove(next(iter(self._texts)))

    def continuation(self, context: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens after the longest match of the end of the context."""
        ngram = tuple(context[-self._ngram_size :])
        longest, tokens = 0, []
        for text_id, end in reversed(self._positions.get(ngram, [])[-MAX_CANDIDATES:]):
            text = self._texts[text_id]
            length = _match_length(text, end, context)
            if length > longest:
                longest, tokens = length, text[end : end + count]
        return tokens

    def _remove(self, text_id: int) -> None:
        text, n = self._texts.pop(text_id), self._ngram_size
        self._num_tokens -= len(text)
        for ngram in {tuple(text[end - n : end]) for end in range(n, len(text))}:
            positions = [p for p in self._positions[ngram] if p[0] != text_id]
            if positions:
                self._positions[ngram] = positions
            else:
                del self._positions[ngram]


def _match_length(text: Sequence[int], end: int, context: Sequence[int]) -> int:
    """The number of tokens before `end` that equal the end of the context."""
    length = 0
    limit = min(end, len(context), MAX_MATCH)
    while length < limit and text[end - 1 - length] == context[-1 - length]:
        length += 1
    return length
