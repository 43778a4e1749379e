"""Calibration sequences: concatenated documents, or single training examples."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..errors import UserError
from .record_formats import DataRecord
from .splits import in_turn
from .tokenization import Example, LossOn, encode_block

# Records to sample from, the first of the source, and records per encoded block.
MAX_CANDIDATES, BLOCK = 20_000, 100


class TooFewTokens(UserError):
    """The records of a dataset do not make one sequence."""


@dataclass(frozen=True)
class CalibrationBatch:
    """Calibration sequences.

    Attributes:
        tokens: int32 [n, length].
        counted: bool [n, length], True where the prediction of the next token counts.
            Positions after the last one of a sequence are padding.
    """

    tokens: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | np.ndarray) -> "CalibrationBatch":
        return CalibrationBatch(self.tokens[index], self.counted[index])

    @classmethod
    def in_turn(cls, batches: Sequence["CalibrationBatch"]) -> "CalibrationBatch":
        """The sequences of several batches in turn, padded to one length."""
        length = max(batch.tokens.shape[1] for batch in batches)

        def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
            widened = (np.pad(a, ((0, 0), (0, length - a.shape[1]))) for a in arrays)
            return np.stack([*in_turn(widened)])

        return cls(
            joined(batch.tokens for batch in batches),
            joined(batch.counted for batch in batches),
        )

    def first(self, tokens: int) -> "CalibrationBatch":
        """The first sequences, as many as have so many tokens, or all."""
        sizes = self.seen.sum(axis=1).cumsum()
        return self[: int(np.searchsorted(sizes, tokens)) + 1]

    @property
    def seen(self) -> np.ndarray:
        """Bool [n, length], True up to the last position of a sequence that counts."""
        return np.maximum.accumulate(self.counted[:, ::-1], axis=1)[:, ::-1]

    @property
    def size(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.seen.sum())

    def parts(self, tokens: int) -> list["CalibrationBatch"]:
        """Batches of sequences of similar length, with at most `tokens` tokens each.

        Common padding is cut off. Sequences of one length keep their order; otherwise
        the order of the batches is random.
        """
        lengths = self.seen.sum(axis=1)
        # From the longest to the shortest: the first sequence of a batch is its
        # longest.
        remaining, batches = np.argsort(-lengths, kind="stable"), []
        while len(remaining):
            width = int(lengths[remaining[0]])
            count = max(1, tokens // max(1, width))
            batch, remaining = self[remaining[:count]], remaining[count:]
            cut = (values[:, :width].copy() for values in (batch.tokens, batch.counted))
            batches.append(CalibrationBatch(*cut))
        if lengths.min() < lengths.max():
            random.Random(len(batches)).shuffle(batches)
        return batches


def concatenated_sequences(
    records: Iterable[DataRecord], tokenizer, *, length: int, tokens: int, seed: int
) -> CalibrationBatch:
    """Documents in random order, concatenated and cut; every position counts.

    Args:
        tokens: number of tokens, rounded down to whole sequences; fewer if the records
            have fewer.

    Raises:
        TooFewTokens: the records do not fill one sequence.
    """
    wanted, documents, size = max(1, tokens // length) * length, [], 0
    # A length above that of any document, so that no document is split.
    for examples in _blocks(
        records, tokenizer, seed, max_seq_length=1 << 40, loss_on="all"
    ):
        documents += [example.tokens for example in examples]
        size += sum(len(example.tokens) for example in examples)
        if size >= wanted:
            break
    count = min(size, wanted) // length
    if count == 0:
        raise TooFewTokens(
            f"the calibration data has {size} tokens, fewer than one sequence of "
            f"{length}",
            hint="set calibration.dataset, or a smaller calibration.max_seq_length",
        )
    joined = np.concatenate(documents)[: count * length].reshape(count, length)
    return CalibrationBatch(joined, np.ones(joined.shape, bool))


def per_example_sequences(
    records: Iterable[DataRecord],
    tokenizer,
    *,
    length: int,
    tokens: int,
    seed: int,
    loss_on: LossOn,
) -> CalibrationBatch:
    """Examples in random order, as in training; the trained tokens count.

    Args:
        length: maximum length; sequences are padded to the longest example.
        tokens: minimum number of tokens, if the records have as many.
        loss_on: see `encode_all`.

    Raises:
        TooFewTokens: no example has a trained token.
    """
    selected: list[Example] = []
    for examples in _blocks(
        records, tokenizer, seed, max_seq_length=length, loss_on=loss_on
    ):
        for example in examples:
            selected.append(example)
            tokens -= len(example.tokens)
            if tokens <= 0:
                return _pad(selected)
    if not selected:
        raise TooFewTokens(
            f"no calibration example has a completion within {length} tokens",
            hint="set calibration.dataset, or a larger calibration.max_seq_length",
        )
    return _pad(selected)


def _blocks(
    records: Iterable[DataRecord], tokenizer, seed: int, **settings
) -> Iterator[list[Example]]:
    candidates = list(islice(records, MAX_CANDIDATES))
    random.Random(seed).shuffle(candidates)
    start, size = 0, 1
    while start < len(candidates):
        block = candidates[start : start + size]
        yield encode_block(block, tokenizer, **settings).examples
        # Start with small blocks: a few long documents may suffice.
        start, size = start + size, min(2 * size, BLOCK)


def _pad(examples: list[Example]) -> CalibrationBatch:
    shape = len(examples), max(len(example.tokens) for example in examples)
    tokens, counted = np.zeros(shape, np.int32), np.zeros(shape, bool)
    for number, example in enumerate(examples):
        size = len(example.tokens)
        tokens[number, :size] = example.tokens
        # The position before a token predicts it.
        counted[number, : size - 1] = example.mask[1:]
    return CalibrationBatch(tokens, counted)
