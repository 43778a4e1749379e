"""Length-bucketed batches, each a function of the seed and the step."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..run.distributed import ProcessGroup
from .tokenization import Example

# `Batch.head_positions` are rounded up to a multiple of 1/8 of a batch's targets, or of
# a larger fraction where a dataset would otherwise have more shapes. MLX compiles each
# shape once and keeps the result (mlx #4464).
HEAD_FRACTIONS = 8
MAX_SHAPES = 32


def bucket_lengths(max_seq_length: int) -> list[int]:
    """Sequence lengths 16, 24, 32, 48, 64, 96, ... and `max_seq_length` itself.

    Few shapes mean few compiled traces. At most a third of a sequence is padding.
    """
    lengths, length = [], 16
    while length < max_seq_length:
        lengths.append(length)
        is_power_of_two = length & (length - 1) == 0
        length = length * 3 // 2 if is_power_of_two else length * 4 // 3
    return [*lengths, max_seq_length]


@dataclass(frozen=True)
class Batch:
    """Sequences of one length.

    Attributes:
        tokens: int32 [B, L + 1]; inputs are tokens[:, :-1], targets tokens[:, 1:].
        mask: bool [B, L], True where the target is trained.
        where: the locations of the examples.
        documents: int32 [B, L], the index of every input's document in its sequence, if
            sequences are packed; padding is a separate document.
        example_indices: the examples, in the order of the sequences.
        target: cached predictions of a teacher, [B, L, ...] each, if there are any.
        head_fractions: number of shapes that `head_positions` may have.
        sequences_per_example: sequences that belong together, one after the other.
    """

    tokens: mx.array
    mask: mx.array
    where: tuple[str, ...]
    documents: mx.array | None = None
    example_indices: tuple[int, ...] = ()
    target: tuple[mx.array, ...] | None = None
    head_fractions: int = HEAD_FRACTIONS
    sequences_per_example: int = 1

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Tokens, mask and documents."""
        return self.tokens, self.mask, self.documents

    @cached_property
    def head_positions(self) -> mx.array | None:
        """Targets that need the LM head: int32 [T] into the B * L targets; None = all.

        These are the trained targets, padded with others until T is a multiple of
        B * L / `head_fractions`: few shapes mean few compiled traces.
        """
        mask = np.array(self.mask).reshape(-1)
        step = -(-mask.size // self.head_fractions)
        count = step * max(1, -(-int(mask.sum()) // step))
        if count >= mask.size:
            return None
        order = np.argsort(~mask, kind="stable")
        return mx.array(np.sort(order[:count]).astype(np.int32))


def rows_of(batch: Batch, parts: int) -> Iterator[Batch]:
    """The batch as so many even batches of consecutive sequences, if it has as many."""
    if parts == 1:
        yield batch
        return
    count = len(batch.tokens)
    for start, end in pairwise(count * part // parts for part in range(parts + 1)):
        if start == end:
            continue
        rows = slice(start, end)
        yield replace(
            batch,
            tokens=batch.tokens[rows],
            mask=batch.mask[rows],
            where=batch.where[rows],
            documents=None if batch.documents is None else batch.documents[rows],
            example_indices=batch.example_indices[rows],
            target=batch.target and tuple(part[rows] for part in batch.target),
        )


class ExampleDataset(Protocol):
    """A sequence of `Example`: a `TokenStore`, or `InMemoryExamples`.

    Attributes:
        lengths: int [examples], tokens per example.
        labels: bool [examples], if the examples have labels, else None.
        digest: a hash of all tokens and masks, which changes when an example does.
    """

    lengths: np.ndarray
    labels: np.ndarray | None
    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class InMemoryExamples(list[Example]):
    """Examples in memory."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(example.tokens) for example in self], np.int32)

    @property
    def labels(self) -> np.ndarray | None:
        labels = [example.label for example in self if example.label is not None]
        return np.array(labels, bool) if labels else None

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for example in self:
            total.update(example.tokens.tobytes())
            total.update(example.mask.tobytes())
        if self.labels is not None:
            total.update(self.labels.tobytes())
        return total.hexdigest()


class BatchSource(Protocol):
    """Batches by index: a `BucketBatchSampler` or a `PackedBatchSampler`.

    Attributes:
        examples: of all batches.
        per_epoch: batches in one pass over the examples.
    """

    examples: ExampleDataset
    per_epoch: int

    def __call__(self, step: int) -> Batch: ...


class BucketBatchSampler:
    """Groups examples of similar length into batches.

    An example belongs to the bucket with the smallest length that holds it. Every epoch
    shuffles the examples of each bucket and the order of the batches. All batches of a
    bucket have one size: sequences with an empty mask fill the last one, so no example
    is left out. Needs about 12 bytes of memory per example.

    Args:
        batch_size: maximum examples per batch, or
        batch_tokens: maximum padded tokens per batch, unless one example has more;
            short sequences then form larger batches.
        sequences_per_example: so many of `examples`, one after the other, stay
            together, such as the chosen and the rejected completion of a prompt.
    """

    def __init__(
        self,
        examples: ExampleDataset | list[Example],
        *,
        max_seq_length: int,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        seed: int = 0,
        sequences_per_example: int = 1,
    ):
        assert (batch_size is None) != (batch_tokens is None)
        self.examples = (
            InMemoryExamples(examples) if isinstance(examples, list) else examples
        )
        self.seed = seed
        self.sequences_per_example = sequences_per_example
        self._epoch, self._order, self._shuffle = -1, [], np.zeros(0)
        self.buckets: list[tuple[int, int, np.ndarray]] = []
        lengths = self.examples.lengths.reshape(-1, sequences_per_example)
        inputs = lengths.max(axis=1) - 1
        low = 0
        for length in bucket_lengths(max_seq_length):
            members = np.flatnonzero((inputs > low) & (inputs <= length))
            low = length
            if count := len(members):
                tokens = length * sequences_per_example
                limit = batch_size or max(1, batch_tokens // tokens)
                size = balanced_batch_size(count, limit)
                self.buckets.append((length, size, members.astype(np.int32)))
        counts = [-(-len(members) // size) for _, size, members in self.buckets]
        self._head_fractions = head_fractions(counts)
        # Index of the first batch of every bucket, and the number of batches.
        self._first_batches = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @property
    def digest(self) -> str:
        """A hash of the examples, which changes when an example does."""
        return self.examples.digest

    @property
    def num_examples(self) -> int:
        """Number of examples, with one or more sequences each."""
        return len(self.examples) // self.sequences_per_example

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return int(self._first_batches[-1])

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs."""
        epoch, position = divmod(step, self.per_epoch)
        if self._epoch != epoch:
            self._shuffle_epoch(epoch)
        index = self._shuffle[position]
        bucket = int(np.searchsorted(self._first_batches, index, side="right")) - 1
        size = self.buckets[bucket][1]
        start = (index - self._first_batches[bucket]) * size
        return self._collate(bucket, self._order[bucket][start : start + size])

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every batch once, unshuffled, alternating between buckets; for validation."""
        plan = [
            (start / len(members), bucket, members[start : start + size])
            for bucket, (_, size, members) in enumerate(self.buckets)
            for start in range(0, len(members), size)
        ]
        for _, bucket, members in sorted(plan, key=lambda p: p[:2])[:limit]:
            yield self._collate(bucket, members)

    def _shuffle_epoch(self, epoch: int) -> None:
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        self._order = [generator.permutation(members) for _, _, members in self.buckets]
        self._shuffle = generator.permutation(self.per_epoch)
        self._epoch = epoch

    def _collate(self, bucket: int, members: np.ndarray) -> Batch:
        length, size, _ = self.buckets[bucket]
        together = self.sequences_per_example
        tokens = np.zeros((size * together, length + 1), np.int32)
        mask = np.zeros((size * together, length), bool)
        indices = (members[:, None] * together + np.arange(together)).reshape(-1)
        where = []
        for row, index in enumerate(indices):
            example = self.examples[index]
            count = len(example.tokens)
            tokens[row, :count] = example.tokens
            mask[row, : count - 1] = example.mask[1:]
            where.append(example.where)
        return Batch(
            mx.array(tokens),
            mx.array(mask),
            tuple(where),
            example_indices=tuple(indices.tolist()),
            head_fractions=self._head_fractions[bucket],
            sequences_per_example=together,
        )


def example_indices(batches: BatchSource, num_batches: int) -> np.ndarray:
    """Indices of the examples in the first batches."""
    if num_batches >= batches.per_epoch:
        return np.arange(len(batches.examples))
    used = {i for n in range(num_batches) for i in batches(n).example_indices}
    return np.array(sorted(used))


def head_fractions(num_batches: list[int]) -> list[int]:
    """`Batch.head_fractions` of every bucket, `MAX_SHAPES` together if possible.

    A bucket with n fractions computes 1/2n of its targets in vain on average. So the
    bucket that gains most over all its batches gets twice as many, in turns.
    """
    fractions = [1] * len(num_batches)
    while True:
        spare = MAX_SHAPES - sum(fractions)
        gains = {
            num_batches[bucket] / count: bucket
            for bucket, count in enumerate(fractions)
            if count <= spare and count < HEAD_FRACTIONS
        }
        if not gains:
            return fractions
        fractions[gains[max(gains)]] *= 2


def balanced_batch_size(count: int, limit: int) -> int:
    """Size of even batches: 33 sequences, at most 32 each, are batches of 17 and 16."""
    return math.ceil(count / math.ceil(count / limit))


@dataclass(frozen=True)
class TargetBatches:
    """Training batches that get their targets when they are used.

    Attributes:
        origin: changes with what makes the targets.
        target: the batch with its target; None = none is stored.
    """

    batches: BatchSource
    origin: str
    target: Callable[[Batch], Batch] | None = None

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        batch = self.batches(step)
        return self.target(batch) if self.target else batch

    @property
    def examples(self) -> ExampleDataset:
        """The training examples."""
        return self.batches.examples

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return self.batches.per_epoch

    @property
    def digest(self) -> str:
        """Hash of the examples and of what makes the targets."""
        return hashlib.sha256(
            f"{self.batches.digest} {self.origin}".encode()
        ).hexdigest()


def shard_batch(batch: Batch, ranks: ProcessGroup) -> Batch:
    """Every `size`-th example of a batch, the same number for every rank.

    Ranks with one example less than others get one with an empty loss mask.
    """
    if ranks.size == 1:
        return batch
    together = batch.sequences_per_example

    def shard(values: mx.array) -> mx.array:
        examples = values.reshape(-1, together, *values.shape[1:])
        local = examples[ranks.rank :: ranks.size]
        missing = -(-len(examples) // ranks.size) - len(local)
        padded = mx.pad(local, [(0, missing), *[(0, 0)] * (local.ndim - 1)])
        return padded.flatten(0, 1)

    arrays = [value if value is None else shard(value) for value in batch.arrays]
    examples = [
        batch.where[start : start + together]
        for start in range(0, len(batch.where), together)
    ]
    where = tuple(chain.from_iterable(ranks.shard(examples)))
    target = batch.target and tuple(shard(value) for value in batch.target)
    fractions = batch.head_fractions
    return Batch(*arrays[:2], where, arrays[2], target=target, head_fractions=fractions)
