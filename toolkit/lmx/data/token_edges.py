"""Tokens of texts, and the number of tokens before some of their characters.

A prompt must have the same tokens in training as in generation. So the text before the
edge of a completion is encoded alone, and must give the first tokens of the whole text.
To encode all of it for every edge takes time that grows with the square of the length.
But a tokenizer splits a text at its added tokens, such as <|im_start|>, and encodes the
parts alone: the tokens before an added token depend on nothing after it. So the text
from the last added token before the edge is enough.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Characters of one text that may be encoded again. In a longer text of a tokenizer
# without added tokens, no edge is found.
MAX_CHARACTERS = 100_000_000


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text.

    Attributes:
        edges: the number of tokens before every edge; None if the text before it,
            encoded alone, has other tokens.
    """

    ids: list[int]
    edges: list[int | None]


@dataclass(frozen=True)
class _Prefix:
    """The text from an added token to an edge, and the number of tokens before it."""

    text: str
    before: int


def encode_with_edges(
    texts: Sequence[tuple[str, Sequence[int]]], tokenizer: Any
) -> list[EncodedText]:
    """The tokens of texts, without BOS and EOS, encoded in batches.

    Args:
        texts: each text, and positions in it in characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _encode_slowly(texts, tokenizer)
    # Some tokenizer.json enable truncation or padding.
    backend.no_truncation()
    backend.no_padding()
    added = _AddedTokens(backend)
    encodings = backend.encode_batch([t for t, _ in texts], add_special_tokens=False)
    found = [
        added.prefixes(text, edges, encoding)
        for (text, edges), encoding in zip(texts, encodings, strict=True)
    ]
    allowed = [prefixes if _is_short(prefixes) else [] for prefixes in found]
    unique = list({prefix.text: None for part in allowed for prefix in part})
    encoded = backend.encode_batch_fast(unique, add_special_tokens=False)
    known = {text: e.ids for text, e in zip(unique, encoded, strict=True)}
    return [
        EncodedText(encoding.ids, _count(encoding.ids, prefixes, known))
        for encoding, prefixes in zip(encodings, found, strict=True)
    ]


def _encode_slowly(
    texts: Sequence[tuple[str, Sequence[int]]], tokenizer: Any
) -> list[EncodedText]:
    """For tokenizers in Python, which do not tell where their tokens are."""
    encoded = []
    for text, edges in texts:
        prefixes = [_Prefix(text[:edge], 0) for edge in edges]
        wanted = {text, *(p.text for p in prefixes if _is_short(prefixes))}
        known = {
            part: list(tokenizer.encode(part, add_special_tokens=False))
            for part in wanted
        }
        encoded.append(EncodedText(known[text], _count(known[text], prefixes, known)))
    return encoded


class _AddedTokens:
    """The added tokens of a tokenizer, which split its texts."""

    def __init__(self, backend: Any):
        decoder = backend.get_added_tokens_decoder()
        self._contents = {number: token.content for number, token in decoder.items()}
        self._ids = np.array(list(self._contents), np.int64)

    def prefixes(self, text: str, edges: Sequence[int], encoding: Any) -> list[_Prefix]:
        """The text from the last added token before each edge."""
        if not set(edges) - {0, len(text)}:
            return [_Prefix("", len(encoding) if edge else 0) for edge in edges]
        ids = np.array(encoding.ids)
        places = np.flatnonzero(np.isin(ids, self._ids))
        added = list(zip(places.tolist(), ids[places].tolist(), strict=True))
        return [self._prefix(text, edge, encoding, added) for edge in edges]

    def _prefix(self, text: str, edge: int, encoding: Any, added: list) -> _Prefix:
        """`added` holds the number and the id of every added token of the text."""
        if edge == len(text):
            return _Prefix("", len(encoding))
        ends = bisect_right(added, edge, key=lambda a: encoding.token_to_chars(a[0])[1])
        if not ends:
            return _Prefix(text[:edge], 0)
        last, number = added[ends - 1]
        start, end = encoding.token_to_chars(last)
        # Another text if the tokenizer changes the case, or drops characters.
        if text[start:end].strip() != self._contents[number].strip():
            return _Prefix(text[:edge], 0)
        return _Prefix(text[start:edge], last)


def _is_short(prefixes: Sequence[_Prefix]) -> bool:
    return sum(len(prefix.text) for prefix in prefixes) <= MAX_CHARACTERS


def _count(
    ids: list[int], prefixes: Sequence[_Prefix], known: dict[str, list[int]]
) -> list[int | None]:
    """The number of tokens before every edge; see `EncodedText`."""
    counts: list[int | None] = []
    for prefix in prefixes:
        part, start = known.get(prefix.text), prefix.before
        is_start = part is not None and ids[start : start + len(part)] == part
        counts.append(start + len(part) if is_start else None)
    return counts
