"""Windows of tokens to watch a model on: documents joined and cut, or row by row."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..errors import UserError
from .record_formats import DataRecord
from .tokenization import Example, LossOn, encode_block

# Rows that are chosen from, the first ones of the source.
CHOICE, BLOCK = 20_000, 100


@dataclass(frozen=True)
class CalibrationBatch:
    """Tokens to watch a model on.

    Attributes:
        tokens: int32 [n, length].
        counted: bool [n, length], True where what is predicted next counts; after the
            last such position of a window there is nothing to be seen.
    """

    tokens: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, chosen: slice | np.ndarray) -> "CalibrationBatch":
        return CalibrationBatch(self.tokens[chosen], self.counted[chosen])

    @property
    def seen(self) -> np.ndarray:
        """Bool [n, length], True up to the last position of a window that counts."""
        return np.maximum.accumulate(self.counted[:, ::-1], axis=1)[:, ::-1]

    @property
    def size(self) -> int:
        """How many tokens are seen."""
        return int(self.seen.sum())

    def parts(self, tokens: int) -> list["CalibrationBatch"]:
        """Windows of about one length together, at most so many tokens in each part.

        What is behind all that is seen of a part is cut off. Of windows of one length
        the order stays; else parts come in a random one.
        """
        lengths = self.seen.sum(axis=1)
        # From the longest down: the first says how long a part is.
        left, found = np.argsort(-lengths, kind="stable"), []
        while len(left):
            width = int(lengths[left[0]])
            count = max(1, tokens // max(1, width))
            part, left = self[left[:count]], left[count:]
            cut = (values[:, :width].copy() for values in (part.tokens, part.counted))
            found.append(CalibrationBatch(*cut))
        if lengths.min() < lengths.max():
            random.Random(len(found)).shuffle(found)
        return found


def concatenated_sequences(
    rows: Iterable[DataRecord], tokenizer, *, length: int, tokens: int, seed: int
) -> CalibrationBatch:
    """Whole documents in random order, joined and cut; every position counts.

    Args:
        tokens: that many, or what the rows have, rounded down to whole windows.

    Raises:
        UserError: the rows do not fill one window.
    """
    wanted, found, size = max(1, tokens // length) * length, [], 0
    # Longer than any, so that no document is cut by itself.
    settings = {"max_seq_length": 1 << 40, "loss_on": "all"}
    for examples in _blocks(rows, tokenizer, seed, **settings):
        found += [example.tokens for example in examples]
        size += sum(len(example.tokens) for example in examples)
        if size >= wanted:
            break
    count = min(size, wanted) // length
    if count == 0:
        raise UserError(
            f"there are {size} tokens to calibrate on, fewer than one window of "
            f"{length}",
            hint="give calibration another source, or a smaller length",
        )
    whole = np.concatenate(found)[: count * length].reshape(count, length)
    return CalibrationBatch(whole, np.ones(whole.shape, bool))


def per_example_sequences(
    rows: Iterable[DataRecord],
    tokenizer,
    *,
    length: int,
    tokens: int,
    seed: int,
    loss_on: LossOn,
) -> CalibrationBatch:
    """Rows in random order, each as training sees it; what it trains on counts.

    Args:
        length: where rows are cut; windows are as long as the longest row.
        tokens: at least so many are seen, if the rows have them.
        loss_on: see `encode_all`.

    Raises:
        UserError: no row has a token to train.
    """
    found: list[Example] = []
    for examples in _blocks(
        rows, tokenizer, seed, max_seq_length=length, loss_on=loss_on
    ):
        for example in examples:
            found.append(example)
            tokens -= len(example.tokens)
            if tokens <= 0:
                return _filled(found)
    if not found:
        raise UserError(
            f"no row has an answer to calibrate on within {length} tokens",
            hint="give calibration another source, or a larger length",
        )
    return _filled(found)


def _blocks(
    rows: Iterable[DataRecord], tokenizer, seed: int, **settings
) -> Iterator[list[Example]]:
    chosen = list(islice(rows, CHOICE))
    random.Random(seed).shuffle(chosen)
    start, size = 0, 1
    while start < len(chosen):
        block = chosen[start : start + size]
        yield encode_block(block, tokenizer, **settings).examples
        # A few long documents may be enough.
        start, size = start + size, min(2 * size, BLOCK)


def _filled(examples: list[Example]) -> CalibrationBatch:
    shape = len(examples), max(len(example.tokens) for example in examples)
    tokens, counted = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for number, example in enumerate(examples):
        size = len(example.tokens)
        tokens[number, :size] = example.tokens
        # The prediction of a token is made where the one before it is seen.
        counted[number, : size - 1] = example.mask[1:]
    return CalibrationBatch(tokens, counted)
