"""The bytes of tokens, which tokenizers of different kinds have in common.

Byte-level BPE writes a space as Ġ and SentencePiece as ▁; one splits a character into
bytes of its alphabet, the other into <0xE2>. So strings of tokens cannot be compared.
The decoding of a single token is no measure either: it lacks the space before a word.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import UserError

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# The bytes that byte-level BPE writes as the character of the same number; the others
# are written as characters from 256 on, in order.
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}


LETTERS = {byte: chr(byte) for byte in PRINTABLE}
LETTERS |= {
    byte: chr(256 + number)
    for number, byte in enumerate(b for b in range(256) if b not in PRINTABLE)
}
# The same in the other direction.
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token adds to a text; they may end inside a character."""
    spelling = _spelling(tokenizer)
    if spelling is None:
        return tokenizer.decode([token], clean_up_tokenization_spaces=False).encode()
    # A model may have more rows than its tokenizer has tokens.
    return _piece(tokenizer.convert_ids_to_tokens(token) or "", spelling)


def _spelling(tokenizer: Any) -> str | None:
    """How strings of tokens spell bytes: "ByteLevel", or as SentencePiece does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = str(getattr(backend, "decoder", None))
    return next((s for s in ("ByteLevel", "ByteFallback", "▁") if s in decoder), None)


def _piece(text: str, spelling: str) -> bytes:
    if spelling == "ByteLevel":
        # Added tokens are written as they are.
        is_spelled = all(letter in BYTES for letter in text)
        return bytes(map(BYTES.get, text)) if is_spelled else text.encode()
    if byte := BYTE_TOKEN.fullmatch(text):
        return bytes([int(byte[1], 16)])
    return text.replace("▁", " ").encode()


class TokenBytes:
    """The tokens of a tokenizer as bytes.

    Attributes:
        pieces: the bytes of every token; empty where a number has no token.
        ends: the tokens at which generation stops.
        special: the added tokens that are no text.

    Raises:
        UserError: the tokens are no pieces of a text's bytes.
    """

    def __init__(self, tokenizer: Any, *, place: str):
        self.tokenizer = tokenizer
        self.ends = frozenset(tokenizer.eos_token_ids)
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(n for n, token in added.items() if token.special)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        spelling = _spelling(tokenizer)
        self.is_byte_level = spelling == "ByteLevel"
        if spelling is None:
            raise UserError(
                "the tokens of this tokenizer are no pieces of a text's bytes, so "
                "those of another tokenizer cannot be compared with them",
                place=place,
                hint="use a teacher and a student with byte-level BPE or SentencePiece",
            )
        contents = {n: str(token).encode() for n, token in added.items()}
        vocabulary = tokenizer.get_vocab()
        self.pieces = [b""] * (max(vocabulary.values()) + 1)
        for text, number in vocabulary.items():
            self.pieces[number] = contents.get(number) or _piece(text, spelling)

    def encode(self, texts: Sequence[bytes]) -> list[list[int]]:
        """The tokens of texts, which may start or end inside a character.

        A text has no tokens if theirs have other bytes, as with a tokenizer that
        changes it.
        """
        encoded: list[list[int]] = [[] for _ in texts]
        whole = []
        for number, text in enumerate(texts):
            with suppress(UnicodeDecodeError):
                whole += [(number, text.decode())] if text else []
        if self.is_byte_level:
            found = self._backend.encode_batch_fast(
                [text for _, text in whole], add_special_tokens=False
            )
            for (number, _), encoding in zip(whole, found, strict=True):
                encoded[number] = encoding.ids
        for number, text in enumerate(texts):
            if self._differs(encoded[number], text):
                # Without the normalizer and the pre-tokenizer, which add a space before
                # the text, or cannot read a part of a character.
                if self.is_byte_level:
                    written = "".join(LETTERS[byte] for byte in text)
                else:
                    written = text.decode(errors="ignore").replace(" ", "▁")
                ids = [token.id for token in self._backend.model.tokenize(written)]
                encoded[number] = [] if self._differs(ids, text) else ids
        return encoded

    def _differs(self, ids: list[int], text: bytes) -> bool:
        return b"".join(self.pieces[number] for number in ids) != text
