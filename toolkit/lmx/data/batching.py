"""Batches of fixed shapes, each a function of the seed and the step alone."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import mlx.core as mx
import numpy as np

from .tokenization import Example

# Of a batch's targets; the head runs on some of the parts.
PARTS = 8


def bucket_lengths(max_seq_length: int) -> list[int]:
    """Row lengths 16, 24, 32, 48, 64, 96, ... and `max_seq_length` itself.

    Few shapes mean few compiled traces; a third of a row is padding at worst.
    """
    rungs, rung = [], 16
    while rung < max_seq_length:
        rungs.append(rung)
        rung = rung * 3 // 2 if rung & (rung - 1) == 0 else rung * 4 // 3
    return [*rungs, max_seq_length]


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Attributes:
        tokens: int32 [B, L + 1]; inputs are tokens[:, :-1], targets tokens[:, 1:].
        mask: bool [B, L], True where the target is trained.
        where: the places of the rows.
        documents: int32 [B, L], the number of every input's document in its row, if
            rows hold several; padding is a document of its own.
        members: the numbers of the examples, in the order in which the rows hold them.
        target: what a teacher predicts, [B, L, ...] each, if that was kept.
    """

    tokens: mx.array
    mask: mx.array
    where: tuple[str, ...]
    documents: mx.array | None = None
    example_indices: tuple[int, ...] = ()
    target: tuple[mx.array, ...] | None = None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Tokens, mask and documents."""
        return self.tokens, self.mask, self.documents

    @cached_property
    def head_positions(self) -> mx.array | None:
        """Where the head is needed: int32 [T] into the B * L targets, or None = at all.

        The trained ones, and as many others as make T a multiple of an eighth of B * L:
        few shapes mean few compiled traces.
        """
        mask = np.array(self.mask).reshape(-1)
        part = -(-mask.size // PARTS)
        count = part * max(1, -(-int(mask.sum()) // part))
        if count >= mask.size:
            return None
        order = np.argsort(~mask, kind="stable")
        return mx.array(np.sort(order[:count]).astype(np.int32))


class ExampleDataset(Protocol):
    """A sequence of `Example`: a `Store`, or `Listed`.

    Attributes:
        lengths: int [examples], their tokens.
        digest: a hash of all tokens and masks, to tell whether they are still the same.
    """

    lengths: np.ndarray
    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class InMemoryExamples(list[Example]):
    """Examples in memory."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(example.tokens) for example in self], np.int32)

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for example in self:
            total.update(example.tokens.tobytes())
            total.update(example.mask.tobytes())
        return total.hexdigest()


class BucketBatchSampler:
    """Cuts examples into batches.

    An example belongs to the smallest rung that holds it. Every epoch shuffles the rows
    of each rung and the order of the batches. All batches of a rung have one size; what
    does not fill the last is filled up with rows whose mask is empty, so that no row is
    ever left out. Needs about a dozen bytes of memory for every example.

    Args:
        rows: rows per batch at most, or
        tokens: padded tokens per batch at most, if a row has no more; short rows then
            go in larger batches.
    """

    def __init__(
        self,
        examples: ExampleDataset | list[Example],
        *,
        max_seq_length: int,
        rows: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
    ):
        assert (rows is None) != (tokens is None)
        self.examples = (
            InMemoryExamples(examples) if isinstance(examples, list) else examples
        )
        self.seed = seed
        self._epoch, self._order, self._shuffle = -1, [], np.zeros(0)
        self.buckets: list[tuple[int, int, np.ndarray]] = []
        inputs = self.examples.lengths - 1
        low = 0
        for length in bucket_lengths(max_seq_length):
            members = np.flatnonzero((inputs > low) & (inputs <= length))
            low = length
            if count := len(members):
                most = rows or max(1, tokens // length)
                size = balanced_batch_size(count, most)
                self.buckets.append((length, size, members.astype(np.int32)))
        counts = [-(-len(members) // size) for _, size, members in self.buckets]
        # Of every rung the number of its first batch, and of all batches.
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @property
    def digest(self) -> str:
        """A hash of the examples, to tell whether rows are still the same."""
        return self.examples.digest

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return int(self._firsts[-1])

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, position = divmod(step, self.per_epoch)
        if self._epoch != epoch:
            self._begin(epoch)
        number = self._shuffle[position]
        rung = np.searchsorted(self._firsts, number, side="right") - 1
        length, size, _ = self.buckets[rung]
        start = (number - self._firsts[rung]) * size
        return self._collate(length, size, self._order[rung][start : start + size])

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every batch once, unshuffled, spread over the rungs; for validation."""
        plan = [
            (start / len(members), length, size, members[start : start + size])
            for length, size, members in self.buckets
            for start in range(0, len(members), size)
        ]
        for _, length, size, members in sorted(plan, key=lambda p: p[:2])[:limit]:
            yield self._collate(length, size, members)

    def _begin(self, epoch: int) -> None:
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        self._order = [generator.permutation(members) for _, _, members in self.buckets]
        self._shuffle = generator.permutation(self.per_epoch)
        self._epoch = epoch

    def _collate(self, length: int, size: int, members: np.ndarray) -> Batch:
        tokens = np.zeros((size, length + 1), np.int32)
        mask = np.zeros((size, length), bool)
        where = []
        for row, index in enumerate(members):
            example = self.examples[index]
            count = len(example.tokens)
            tokens[row, :count] = example.tokens
            mask[row, : count - 1] = example.mask[1:]
            where.append(example.where)
        return Batch(
            mx.array(tokens),
            mx.array(mask),
            tuple(where),
            example_indices=tuple(members.tolist()),
        )


def balanced_batch_size(count: int, most: int) -> int:
    """Rows of even batches: 33 rows, at most 32 at a time, are 17 and 16."""
    return math.ceil(count / math.ceil(count / most))
