"""Length-bucketed batches, each a function of the seed and the step."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..interfaces import Communicator
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


class BatchArrays(NamedTuple):
    """The arrays of a batch; see `Batch`.

    Attributes:
        places: the head positions; None = the head runs on all targets.
    """

    tokens: mx.array
    mask: mx.array
    documents: mx.array | None = None
    places: mx.array | None = None
    target: tuple[mx.array, ...] | None = None

    @property
    def inputs(self) -> mx.array:
        """Int32 [B, L]."""
        return self.tokens[:, :-1]

    @property
    def next_tokens(self) -> mx.array:
        """The targets, int32 [B, L]."""
        return self.tokens[:, 1:]


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

    def arrays(self, *, with_places: bool = True) -> "BatchArrays":
        """What a loss gets. Every number of places compiles once more."""
        places = self.head_positions if with_places else None
        return BatchArrays(self.tokens, self.mask, self.documents, places, self.target)

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


class StepSampler(ABC):
    """Batches of items, shuffled in every epoch and grouped by optimizer step.

    The items of an epoch are cut into even steps, and a step into as few even batches
    as the limit allows. So half the batch size and twice the accumulation leave the
    items of every step as they are.

    Args:
        pools: the items; each pool is shuffled by itself, and the next one follows.
        limits: numbers of consecutive items, and the maximum of each in a batch. Where
            the items of one number do not fill a step, it gets some of the next.
        accumulation: maximum batches per step.

    Attributes:
        examples: of all batches.
        per_epoch, steps_per_epoch: batches and steps in one pass over the examples.
    """

    examples: ExampleDataset
    sequences_per_example = 1

    def __init__(
        self,
        pools: list[np.ndarray],
        limits: list[tuple[int, int]],
        accumulation: int,
        seed: int,
    ):
        self._pools, self.accumulation, self.seed = pools, accumulation, seed
        self._epoch = -1
        total, end, edges = sum(count for count, _ in limits), 0, [0]
        batches, rows = [], []
        for count, limit in limits:
            end, start, most = end + count, edges[-1], limit * accumulation
            if start >= end:
                continue
            steps = -(-(end - start) // most)
            taken = min(steps * most, total - start)
            edges += [start + taken * step // steps for step in range(1, steps + 1)]
            largest = -(-taken // steps)
            # Even batches: 33 items, at most 32 each, are batches of 17 and 16.
            count_of_step = -(-largest // limit)
            batches += [count_of_step] * steps
            rows += [-(-largest // count_of_step)] * steps
        sizes = np.diff(edges)
        self._batches = np.minimum(batches, sizes)
        self._first_batches = np.cumsum(self._batches) - self._batches
        # Of every batch, in the order of the items.
        step = np.repeat(np.arange(len(sizes)), self._batches)
        part = np.arange(len(step)) - self._first_batches[step]
        starts = np.array(edges)[step] + sizes[step] * part // self._batches[step]
        self._starts, self._rows = np.append(starts, total), np.array(rows)[step]
        self.per_epoch, self.steps_per_epoch = len(step), len(sizes)

    @abstractmethod
    def _collate(self, number: int, items: np.ndarray) -> Batch:
        """The batch of a number, which begins at `_starts[number]` of the items."""

    @property
    def digest(self) -> str:
        """A hash of the examples, which changes when an example does."""
        return self.examples.digest

    @property
    def num_examples(self) -> int:
        """Number of examples, with one or more sequences each."""
        return len(self.examples) // self.sequences_per_example

    def indices(self, step: int) -> range:
        """The indices of the batches of a step, counted from 0 over all epochs."""
        start = step * self.accumulation
        return range(start, start + int(self._batches[self._shuffled_step(step)]))

    def __call__(self, index: int) -> Batch:
        """The batch of an index of `indices`."""
        step, part = divmod(index, self.accumulation)
        number = self._first_batches[self._shuffled_step(step)] + part
        return self._collate(number, self._items)

    def _shuffled_step(self, step: int) -> int:
        epoch, position = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            pools = [generator.permutation(pool) for pool in self._pools]
            self._items = np.concatenate(pools)
            self._steps = generator.permutation(self.steps_per_epoch)
            self._epoch = epoch
        return self._steps[position]


class BucketBatchSampler(StepSampler):
    """Groups examples of similar length into batches.

    An example belongs to the bucket with the smallest length that holds it. Every epoch
    shuffles the examples of each bucket and the order of the steps. The last examples
    of a bucket share a batch with some of the next shorter one. Batches of one length
    have one size: sequences with an empty mask fill them. Needs about 16 bytes of
    memory per example.

    Args:
        batch_size: maximum examples per batch, or
        batch_tokens: maximum padded tokens per batch, unless one example has more;
            short sequences then form larger batches.
        accumulation: maximum batches per step.
        sequences_per_example: so many of `examples`, one after the other, stay
            together, such as the chosen and the rejected completion of a prompt.

    Attributes:
        shapes: lengths and sequences of the batches, each pair once.
    """

    def __init__(
        self,
        examples: ExampleDataset | list[Example],
        *,
        max_seq_length: int,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        accumulation: int = 1,
        seed: int = 0,
        sequences_per_example: int = 1,
    ):
        assert (batch_size is None) != (batch_tokens is None)
        self.examples = (
            InMemoryExamples(examples) if isinstance(examples, list) else examples
        )
        self.sequences_per_example = sequences_per_example
        lengths = np.array(bucket_lengths(max_seq_length))
        together = self.examples.lengths.reshape(-1, sequences_per_example)
        bucket_of = np.searchsorted(lengths, together.max(axis=1) - 1)
        used = np.unique(bucket_of)[::-1]
        buckets = [np.flatnonzero(bucket_of == n).astype(np.int32) for n in used]
        counts = [len(members) for members in buckets]
        limits = [(len(bucket_of), batch_size)]
        if batch_tokens:
            sizes = batch_tokens // (lengths[used] * sequences_per_example)
            limits = list(zip(counts, np.maximum(1, sizes).tolist(), strict=True))
        super().__init__(buckets, limits, accumulation, seed)
        # The first example of a batch is one of its longest.
        first = np.searchsorted(np.cumsum(counts), self._starts[:-1], side="right")
        pairs = np.stack([lengths[used][first], self._rows * sequences_per_example])
        shapes, self._shape_of, uses = np.unique(
            pairs, axis=1, return_inverse=True, return_counts=True
        )
        self.shapes = list(zip(*shapes.tolist(), strict=True))
        self._head_fractions = head_fractions(uses.tolist())

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every batch once, unshuffled, alternating between shapes; for validation."""
        items, place = np.concatenate(self._pools), np.zeros(self.per_epoch)
        for shape in range(len(self.shapes)):
            of_shape = self._shape_of == shape
            place[of_shape] = np.linspace(0, 1, of_shape.sum(), endpoint=False)
        order = np.lexsort((self._shape_of, place))
        for number in order[:limit]:
            yield self._collate(number, items)

    def _collate(self, number: int, items: np.ndarray) -> Batch:
        items = items[slice(*self._starts[number : number + 2])]
        shape = self._shape_of[number]
        (length, rows), together = self.shapes[shape], self.sequences_per_example
        tokens = np.zeros((rows, length + 1), np.int32)
        mask = np.zeros((rows, length), bool)
        indices = (items[:, None] * together + np.arange(together)).reshape(-1)
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
            head_fractions=self._head_fractions[shape],
            sequences_per_example=together,
        )


def example_indices(batches: StepSampler, steps: int) -> np.ndarray:
    """Indices of the examples in the first steps."""
    if steps >= batches.steps_per_epoch:
        return np.arange(len(batches.examples))
    numbers = chain.from_iterable(map(batches.indices, range(steps)))
    used = {i for n in numbers for i in batches(n).example_indices}
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


@dataclass(frozen=True)
class TargetBatches:
    """Training batches that get their targets when they are used.

    Attributes:
        origin: changes with what makes the targets.
        target: the batch with its target; None = none is stored.
    """

    batches: StepSampler
    origin: str
    target: Callable[[Batch], Batch] | None = None

    def indices(self, step: int) -> range:
        """The indices of the batches of a step."""
        return self.batches.indices(step)

    def __call__(self, index: int) -> Batch:
        """The batch of an index."""
        batch = self.batches(index)
        return self.target(batch) if self.target else batch

    @property
    def examples(self) -> ExampleDataset:
        """The training examples."""
        return self.batches.examples

    @property
    def digest(self) -> str:
        """Hash of the examples and of what makes the targets."""
        return hashlib.sha256(
            f"{self.batches.digest} {self.origin}".encode()
        ).hexdigest()


def shard_batch(batch: Batch, ranks: Communicator) -> Batch:
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

    arrays = batch.tokens, batch.mask, batch.documents
    arrays = [value if value is None else shard(value) for value in arrays]
    examples = [
        batch.where[start : start + together]
        for start in range(0, len(batch.where), together)
    ]
    where = tuple(chain.from_iterable(ranks.shard(examples)))
    target = batch.target and tuple(shard(value) for value in batch.target)
    fractions = batch.head_fractions
    return Batch(*arrays[:2], where, arrays[2], target=target, head_fractions=fractions)
