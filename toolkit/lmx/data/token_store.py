"""Tokenized training examples on disk: written in blocks, read memory-mapped."""

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..files.artifacts import Artifact
from .record_formats import DataRecord
from .tokenization import (
    COUNTS,
    EncodeResult,
    Example,
    LossOn,
    encode_block,
    in_blocks,
    no_trainable_examples,
)

# Records that are encoded together, at most.
BLOCK_RECORDS = 1_000
TRAINED_BIT = np.uint32(1 << 31)
LABELS = "labels.values"
SECONDS_BETWEEN_LOGS = 5.0
# Dropped records that are logged.
MAX_LOGGED = 5


# Makes examples of a block of records; called as `encode_block` is.
Encode = Callable[..., EncodeResult]


class RaggedArray:
    """Memory-mapped rows of different lengths, written by `RaggedWriter`."""

    def __init__(self, folder: Path, name: str, dtype: type):
        # Slicing a plain array is faster than slicing a memmap.
        self.starts = np.asarray(np.memmap(folder / f"{name}.starts", np.int64, "r"))
        self._values = np.asarray(np.memmap(folder / f"{name}.values", dtype, "r"))

    def __getitem__(self, index: int) -> np.ndarray:
        return self._values[self.starts[index] : self.starts[index + 1]]


class RaggedWriter:
    """Writes the values of a `RaggedArray`, and the start of every row and the end."""

    def __init__(self, folder: Path, name: str, opened: ExitStack):
        self._values = opened.enter_context((folder / f"{name}.values").open("wb"))
        self._starts = opened.enter_context((folder / f"{name}.starts").open("wb"))
        self._starts.write(np.int64(0).tobytes())
        self.end = 0

    def write(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """Append rows of these lengths; `values` holds them one after the other."""
        ends = self.end + np.cumsum(lengths, dtype=np.int64)
        self._values.write(values.tobytes())
        self._starts.write(ends.tobytes())
        self.end = int(ends[-1])


class TokenStore:
    """The examples that `write_token_store` wrote. Only their lengths are in memory.

    Attributes:
        lengths: int32 [examples], tokens per example.
        labels: bool [examples], if the examples have labels, else None.
        digest: a hash of all tokens, masks and labels.
    """

    def __init__(self, artifact: Artifact):
        # The highest bit of a word is set if the token is trained.
        self._tokens = RaggedArray(artifact.folder, "tokens", np.uint32)
        self._places = RaggedArray(artifact.folder, "places", np.uint8)
        self.lengths = np.diff(self._tokens.starts).astype(np.int32)
        labels = artifact.folder / LABELS
        self.labels = np.fromfile(labels, np.bool_) if labels.stat().st_size else None
        self.digest: str = artifact.facts["digest"]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        words = self._tokens[index]
        mask = words >= TRAINED_BIT
        tokens = (words & ~TRAINED_BIT).astype(np.int32)
        return Example(tokens, mask, self._places[index].tobytes().decode())


def write_token_store(
    folder: Path,
    records: Iterable[DataRecord],
    tokenizer,
    *,
    max_seq_length: int,
    loss_on: LossOn,
    info: Callable[[str], None],
    encode: Encode | None = None,
) -> dict:
    """Encode records block by block into an empty folder; returns counts.

    Args:
        encode: makes the examples of a block of records; None = `encode_block`.

    Raises:
        UserError: no record has a trained token.
    """
    facts = dict.fromkeys(("records", "examples", "dropped", *COUNTS), 0)
    logged: list[tuple[str, str]] = []
    total = hashlib.sha256()
    started = last_log = time.monotonic()
    with ExitStack() as opened:
        tokens, places = (RaggedWriter(folder, n, opened) for n in ("tokens", "places"))
        labels = opened.enter_context((folder / LABELS).open("wb"))
        for block in in_blocks(records, lambda r: len(r.as_text()), BLOCK_RECORDS):
            encoded = (encode or encode_block)(
                block, tokenizer, max_seq_length=max_seq_length, loss_on=loss_on
            )
            logged += encoded.dropped[: MAX_LOGGED - len(logged)]
            facts["records"] += len(block)
            facts["examples"] += len(encoded.examples)
            facts["dropped"] += len(encoded.dropped)
            for name in COUNTS:
                facts[name] += getattr(encoded, name)
            if examples := encoded.examples:
                words = [
                    e.tokens.astype(np.uint32) | e.mask * TRAINED_BIT for e in examples
                ]
                for piece in words:
                    total.update(len(piece).to_bytes(8, "little"))
                    total.update(piece)
                tokens.write(np.concatenate(words), np.array([*map(len, words)]))
                values = bytes(e.label for e in examples if e.label is not None)
                total.update(values)
                labels.write(values)
                names = [example.where.encode() for example in examples]
                text = np.frombuffer(b"".join(names), np.uint8)
                places.write(text, np.array([*map(len, names)]))
            if (now := time.monotonic()) - last_log > SECONDS_BETWEEN_LOGS:
                last_log, speed = now, facts["records"] / (now - started)
                count = facts["records"]
                info(f"tokenizing: {count:,} examples, {speed:,.0f} examples/s")
    if not facts["examples"]:
        raise no_trainable_examples(facts["records"], logged)
    digest = total.hexdigest()
    return facts | {"tokens": tokens.end, "first_dropped": logged, "digest": digest}
