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
# The text from an added token to an edge, and the number of tokens before it.
Prefix = tuple[str, int]


@dataclass(frozen=True)
class EncodedText:
    """The tokens of a text.

    Attributes:
        edges: the number of tokens before every edge; None if the text before it,
            encoded alone, has other tokens.
    """

    ids: list[int]
    edges: list[int | None]


def encode_with_edges(
    texts: Sequence[tuple[str, Sequence[int]]], tokenizer: Any
) -> list[EncodedText]:
    """The tokens of texts, without BOS and EOS, encoded in batches.

    Args:
        texts: each text, and positions in it in characters.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        # Tokenizers in Python do not tell where their tokens are.
        def encode(parts: list[str]) -> list[list[int]]:
            return [list(tokenizer.encode(p, add_special_tokens=False)) for p in parts]

        ids = encode([text for text, _ in texts])
        found = [[(text[:edge], 0) for edge in edges] for text, edges in texts]
    else:
        # Some tokenizer.json enable truncation or padding.
        backend.no_truncation()
        backend.no_padding()

        def encode(parts: list[str]) -> list[list[int]]:
            encoded = backend.encode_batch_fast(parts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]

        whole = [text for text, _ in texts]
        encodings = backend.encode_batch(whole, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        decoder = backend.get_added_tokens_decoder()
        added = {number: token.content for number, token in decoder.items()}
        found = [
            _prefixes(text, edges, encoding, added)
            for (text, edges), encoding in zip(texts, encodings, strict=True)
        ]
    known = {text: own for (text, _), own in zip(texts, ids, strict=True)}
    wanted = {}
    for prefixes in found:
        if sum(len(text) for text, _ in prefixes) <= MAX_CHARACTERS:
            wanted |= {text: None for text, _ in prefixes if text not in known}
    known |= zip(wanted, encode([*wanted]), strict=True)
    encoded_texts = []
    for own, prefixes in zip(ids, found, strict=True):
        counts: list[int | None] = []
        for text, start in prefixes:
            part = known.get(text)
            is_start = part is not None and own[start : start + len(part)] == part
            counts.append(start + len(part) if is_start else None)
        encoded_texts.append(EncodedText(own, counts))
    return encoded_texts


def _prefixes(
    text: str, edges: Sequence[int], encoding: Any, contents: dict[int, str]
) -> list[Prefix]:
    """The text from the last added token before each edge.

    Args:
        contents: the added tokens of the tokenizer, which split its texts.
    """
    if not set(edges) - {0, len(text)}:
        return [("", len(encoding) if edge else 0) for edge in edges]
    ids = np.array(encoding.ids)
    places = np.flatnonzero(np.isin(ids, np.array([*contents], np.int64)))
    added = list(zip(places.tolist(), ids[places].tolist(), strict=True))
    prefixes = []
    for edge in edges:
        if edge == len(text):
            prefixes.append(("", len(encoding)))
            continue
        prefix = text[:edge], 0
        ends = bisect_right(added, edge, key=lambda a: encoding.token_to_chars(a[0])[1])
        if ends:
            last, number = added[ends - 1]
            start, end = encoding.token_to_chars(last)
            # Another text if the tokenizer changes the case, or drops characters.
            if text[start:end].strip() == contents[number].strip():
                prefix = text[start:edge], last
        prefixes.append(prefix)
    return prefixes
