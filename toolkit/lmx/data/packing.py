"""Sequence packing: several examples in one sequence, and batches of them."""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import cache
from .batching import Batch, ExampleDataset, StepSampler

ORDER, STARTS = "order.npy", "starts.npy"


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit-decreasing bin packing (arXiv 2404.10830); deterministic.

    The longest example goes first, into the fullest sequence that still holds it. All
    examples of one length are placed together, so the work grows with the number of
    different lengths, not of examples: after an example, the fullest sequence that fits
    has less space, and remains the best fit for the next example of this length.

    Args:
        lengths: int [examples], none above `capacity`.
        capacity: tokens of a sequence.

    Returns:
        The examples sequence by sequence (int32 [examples]), and the start of every
        sequence among them, followed by the end (int64 [sequences + 1]).
    """
    assert 0 < lengths.min() <= lengths.max() <= capacity
    longest_first = np.argsort(-lengths, kind="stable").astype(np.int32)
    sequence_of = np.empty(len(lengths), np.int32)
    bins = _Bins(capacity)
    counts = np.bincount(lengths)
    done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = done + int(counts[length])
        while done < end:
            placed = bins.place(length, end - done)
            sequence_of[done : done + len(placed)] = placed
            done += len(placed)
    by_sequence = np.argsort(sequence_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(sequence_of))])
    return longest_first[by_sequence], starts.astype(np.int64)


class _Bins:
    """Sequences by their free space."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._count = 0
        self._spaces: list[int] = []  # the free spaces that occur, ascending
        self._by_space: dict[int, list[int]] = defaultdict(list)

    def place(self, length: int, count: int) -> np.ndarray:
        """Place at most `count` examples of a length; returns the sequence of each."""
        position = bisect_left(self._spaces, length)
        if position == len(self._spaces):
            space = self._capacity
            needed = -(-count // (space // length))
            chosen = list(range(self._count, self._count + needed))
            self._count += needed
        else:
            space = self._spaces[position]
            candidates = self._by_space[space]
            needed = min(len(candidates), -(-count // (space // length)))
            chosen = candidates[-needed:]
            del candidates[-needed:]
            if not candidates:
                del self._spaces[position]
        each = space // length
        sequences = np.repeat(np.array(chosen, np.int32), each)[:count]
        in_last = len(sequences) - each * (needed - 1)
        self._add(space - each * length, chosen[:-1])
        self._add(space - in_last * length, chosen[-1:])
        return sequences

    def _add(self, space: int, sequences: list[int]) -> None:
        if space and sequences:
            if not self._by_space[space]:
                insort(self._spaces, space)
            self._by_space[space] += sequences


def packed(
    examples: ExampleDataset, capacity: int, warning
) -> tuple[np.ndarray, np.ndarray]:
    """The result of `pack` for these examples, from the cache after the first call."""

    def make(folder: Path) -> None:
        order, starts = pack(examples.lengths, capacity)
        np.save(folder / ORDER, order)
        np.save(folder / STARTS, starts)

    key = f"{examples.digest}-{capacity}"
    entry = cache.store(warning).get_or_make("packed", key, make)
    return np.load(entry.folder / ORDER), np.load(entry.folder / STARTS)


class PackedBatchSampler(StepSampler):
    """Batches of packed sequences, shuffled in every epoch.

    All batches have one shape: sequences with an empty mask fill the last one. The
    first token of an example is never trained.

    Args:
        plan: the result of `pack` for a capacity of `max_seq_length` + 1.
        batch_size: maximum sequences per batch.
        accumulation: maximum batches per step.
    """

    def __init__(
        self,
        examples: ExampleDataset,
        plan: tuple[np.ndarray, np.ndarray],
        *,
        max_seq_length: int,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
    ):
        self.examples = examples
        self._order, self._edges = plan
        self._length = max_seq_length
        count = self.num_sequences
        super().__init__([np.arange(count)], [(count, batch_size)], accumulation, seed)

    @property
    def num_sequences(self) -> int:
        """Packed sequences in one pass over the examples."""
        return len(self._edges) - 1

    @property
    def filled(self) -> float:
        """The fraction of the sequences' tokens that is not padding."""
        total = int(self.examples.lengths.sum(dtype=np.int64))
        return total / (self.num_sequences * (self._length + 1))

    def _collate(self, number: int, items: np.ndarray) -> Batch:
        sequences = items[slice(*self._starts[number : number + 2])]
        shape = (self._rows[number], self._length + 1)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        documents = np.zeros(shape, np.int32)
        where, indices = [], []
        for row, sequence in enumerate(sequences):
            members = self._order[self._edges[sequence] : self._edges[sequence + 1]]
            indices += members.tolist()
            end = 0
            for document, index in enumerate(members):
                example = self.examples[index]
                start, end = end, end + len(example.tokens)
                tokens[row, start:end] = example.tokens
                mask[row, start:end] = example.mask
                documents[row, start:end] = document
                where.append(example.where)
            documents[row, end:] = len(members)
        return Batch(
            mx.array(tokens),
            mx.array(mask[:, 1:]),
            tuple(where),
            mx.array(documents[:, :-1]),
            tuple(indices),
        )
