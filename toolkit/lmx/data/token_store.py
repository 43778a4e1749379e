"""Tokens of all training rows on disk: written once in blocks, read through a map."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from .cache import CacheEntry
from .record_formats import DataRecord
from .tokenization import (
    EncodeResult,
    Example,
    LossOn,
    encode_block,
    no_trainable_examples,
)

BLOCK_ROWS, BLOCK_CHARACTERS = 1_000, 4_000_000
TRAINED = np.uint32(1 << 31)
TOLD_EVERY = 5.0
NAMED = 5


class RaggedArray:
    """Pieces of different lengths, one after the other, as `Writer` leaves them."""

    def __init__(self, folder: Path, name: str, dtype: type):
        # Slices of a plain array are made faster than those of a memmap.
        self.starts = np.asarray(np.memmap(folder / f"{name}.starts", np.int64, "r"))
        self._values = np.asarray(np.memmap(folder / f"{name}.values", dtype, "r"))

    def __getitem__(self, index: int) -> np.ndarray:
        return self._values[self.starts[index] : self.starts[index + 1]]


class RaggedWriter:
    """Writes a `Column`: the values, and where every piece starts, and the end."""

    def __init__(self, folder: Path, name: str, opened: ExitStack):
        self._values = opened.enter_context((folder / f"{name}.values").open("wb"))
        self._starts = opened.enter_context((folder / f"{name}.starts").open("wb"))
        self._starts.write(np.int64(0).tobytes())
        self.end = 0

    def write(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """Append the pieces of these lengths that `values` holds."""
        ends = self.end + np.cumsum(lengths, dtype=np.int64)
        self._values.write(values.tobytes())
        self._starts.write(ends.tobytes())
        self.end = int(ends[-1])


class TokenStore:
    """The examples of a folder that `write` filled; in memory are only their lengths.

    Attributes:
        lengths: int32 [examples], their tokens.
        digest: a hash of all tokens and masks.
    """

    def __init__(self, kept: CacheEntry):
        # uint32, the highest bit set where the token is trained.
        self._tokens = RaggedArray(kept.folder, "tokens", np.uint32)
        self._places = RaggedArray(kept.folder, "places", np.uint8)
        self.lengths = np.diff(self._tokens.starts).astype(np.int32)
        self.digest: str = kept.facts["digest"]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        words = self._tokens[index]
        mask = words >= TRAINED
        tokens = (words & ~TRAINED).astype(np.int32)
        return Example(tokens, mask, self._places[index].tobytes().decode())


def write_token_store(
    folder: Path,
    rows: Iterable[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn,
    info: Callable[[str], None],
) -> dict:
    """Encode rows block by block into an empty folder; returns facts of all of them.

    Raises:
        UserError: no row has a token to train.
    """
    facts = {"rows": 0, "examples": 0, "truncated": 0, "last_only": 0, "dropped": 0}
    named: list[tuple[str, str]] = []
    total = hashlib.sha256()
    clock = _ProgressLogger(info)
    with ExitStack() as opened:
        tokens, places = (RaggedWriter(folder, n, opened) for n in ("tokens", "places"))
        for block in _blocks(rows):
            encoded = encode_block(
                block, tokenizer, max_seq_length=max_seq_length, loss_on=loss_on
            )
            named += encoded.dropped[: NAMED - len(named)]
            _count(facts, len(block), encoded)
            if encoded.examples:
                _append(encoded.examples, tokens, places, total)
            clock.tick(facts["rows"])
    if not facts["examples"]:
        raise no_trainable_examples(facts["rows"], named)
    digest = total.hexdigest()
    return facts | {"tokens": tokens.end, "named": named, "digest": digest}


def _count(facts: dict, rows: int, encoded: EncodeResult) -> None:
    facts["rows"] += rows
    facts["examples"] += len(encoded.examples)
    facts["truncated"] += encoded.truncated
    facts["last_only"] += encoded.last_only
    facts["dropped"] += len(encoded.dropped)


def _append(
    examples: list[Example], tokens: RaggedWriter, places: RaggedWriter, total
) -> None:
    words = [e.tokens.astype(np.uint32) | e.mask * TRAINED for e in examples]
    for piece in words:
        total.update(len(piece).to_bytes(8, "little"))
        total.update(piece)
    tokens.write(np.concatenate(words), np.array([len(w) for w in words]))
    names = [example.where.encode() for example in examples]
    text = np.frombuffer(b"".join(names), np.uint8)
    places.write(text, np.array([len(name) for name in names]))


def _blocks(rows: Iterable[DataRecord]) -> Iterator[list[DataRecord]]:
    """Rows that are encoded together, few enough for any memory."""
    block, characters = [], 0
    for row in rows:
        block.append(row)
        characters += len(row.as_text())
        if len(block) == BLOCK_ROWS or characters > BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


class _ProgressLogger:
    """Says every few seconds how far it is."""

    def __init__(self, info: Callable[[str], None]):
        self._say = info
        self._begun = self._told = time.monotonic()

    def tick(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._told > TOLD_EVERY:
            self._told = now
            speed = rows / (now - self._begun)
            self._say(f"tokenising: {rows:,} rows, {speed:,.0f} rows/s")
