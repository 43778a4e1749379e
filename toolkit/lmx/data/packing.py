"""Several examples in one row: how they are packed, and batches of such rows."""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path

import mlx.core as mx
import numpy as np

from . import cache
from .batching import Batch, ExampleDataset, balanced_batch_size

ORDER, STARTS = "order.npy", "starts.npy"


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit-decreasing bin packing (arXiv 2404.10830), the same one every time.

    The longest first, each into the fullest row that still holds it. All examples of
    one length are placed together, so that the work grows with the kinds of rows rather
    than their number: a row with the least space that fits has less space afterwards,
    and so gets the next ones, too.

    Args:
        lengths: int [examples], none above `capacity`.
        capacity: of a row.

    Returns:
        The examples row by row (int32 [examples]), and where every row starts among
        them, with the end (int64 [rows + 1]).
    """
    assert 0 < lengths.min() <= lengths.max() <= capacity
    longest_first = np.argsort(-lengths, kind="stable").astype(np.int32)
    row_of = np.empty(len(lengths), np.int32)
    rows = _Rows(capacity)
    counts = np.bincount(lengths)
    done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = done + int(counts[length])
        while done < end:
            taken = rows.place(length, end - done)
            row_of[done : done + len(taken)] = taken
            done += len(taken)
    by_row = np.argsort(row_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of))])
    return longest_first[by_row], starts.astype(np.int64)


class _Rows:
    """Rows by the space that is left in them."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._count = 0
        self._spaces: list[int] = []  # those that rows have, ascending
        self._with: dict[int, list[int]] = defaultdict(list)

    def place(self, length: int, count: int) -> np.ndarray:
        """Place some examples of a length, `count` at most; the row of each."""
        position = bisect_left(self._spaces, length)
        if position == len(self._spaces):
            space = self._capacity
            needed = -(-count // (space // length))
            found = list(range(self._count, self._count + needed))
            self._count += needed
        else:
            space = self._spaces[position]
            held = self._with[space]
            needed = min(len(held), -(-count // (space // length)))
            found = held[-needed:]
            del held[-needed:]
            if not held:
                del self._spaces[position]
        each = space // length
        rows = np.repeat(np.array(found, np.int32), each)[:count]
        in_last = len(rows) - each * (needed - 1)
        self._put(space - each * length, found[:-1])
        self._put(space - in_last * length, found[-1:])
        return rows

    def _put(self, space: int, rows: list[int]) -> None:
        if space and rows:
            if not self._with[space]:
                insort(self._spaces, space)
            self._with[space] += rows


def packed(
    examples: ExampleDataset, capacity: int, warning
) -> tuple[np.ndarray, np.ndarray]:
    """`pack` for these examples, made once and kept in the cache."""

    def fill(folder: Path) -> dict:
        order, starts = pack(examples.lengths, capacity)
        np.save(folder / ORDER, order)
        np.save(folder / STARTS, starts)
        return {}

    key = f"{examples.digest}-{capacity}"
    kept = cache.get_or_create("packed", key, fill, warning=warning)
    return np.load(kept.folder / ORDER), np.load(kept.folder / STARTS)


class PackedBatchSampler:
    """Batches of rows that hold several examples, shuffled in every epoch.

    All batches have one shape; what does not fill the last is filled up with rows whose
    mask is empty. The first token of an example is never trained.

    Args:
        plan: what `pack` returned for a capacity of `max_seq_length` + 1.
        rows: rows per batch at most.
    """

    def __init__(
        self,
        examples: ExampleDataset,
        plan: tuple[np.ndarray, np.ndarray],
        *,
        max_seq_length: int,
        rows: int,
        seed: int = 0,
    ):
        self.examples = examples
        self.seed = seed
        self._order, self._starts = plan
        self._length = max_seq_length
        self._size = balanced_batch_size(self.rows, rows)
        self._epoch, self._shuffle = -1, np.zeros(0, np.int64)

    @property
    def rows(self) -> int:
        """Packed rows in one pass over the examples."""
        return len(self._starts) - 1

    @property
    def digest(self) -> str:
        """A hash of the examples, to tell whether rows are still the same."""
        return self.examples.digest

    @property
    def filled(self) -> float:
        """The share of the rows' tokens that is no padding."""
        total = int(self.examples.lengths.sum(dtype=np.int64))
        return total / (self.rows * (self._length + 1))

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return -(-self.rows // self._size)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, position = divmod(step, self.per_epoch)
        if self._epoch != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._shuffle = generator.permutation(self.rows)
            self._epoch = epoch
        start = position * self._size
        return self._collate(self._shuffle[start : start + self._size])

    def _collate(self, numbers: np.ndarray) -> Batch:
        shape = (self._size, self._length + 1)
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        documents = np.zeros(shape, np.int32)
        where, found = [], []
        for row, number in enumerate(numbers):
            members = self._order[self._starts[number] : self._starts[number + 1]]
            found += members.tolist()
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
            tuple(found),
        )
