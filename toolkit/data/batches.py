"""Batches of fixed shapes, each a function of the seed and the step alone."""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from .template import Example

PARTS = 8


def ladder(max_length: int) -> list[int]:
    """Row lengths 16, 24, 32, 48, 64, 96, ... and `max_length` itself.

    Few shapes mean few compiled traces; a third of a row is padding at worst.
    """
    rungs, rung = [], 16
    while rung < max_length:
        rungs.append(rung)
        rung = rung * 3 // 2 if rung & (rung - 1) == 0 else rung * 4 // 3
    return [*rungs, max_length]


@dataclass(frozen=True)
class Batch:
    """Rows of one length.

    Attributes:
        tokens: int32 [B, L + 1]; inputs are tokens[:, :-1], targets tokens[:, 1:].
        mask: bool [B, L], True where the target is trained.
        where: the places of the rows.
        documents: int32 [B, L], the number of every input's document in its row, if
            rows hold several; padding is a document of its own.
    """

    tokens: mx.array
    mask: mx.array
    where: tuple[str, ...]
    documents: mx.array | None = None

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Tokens, mask and documents."""
        return self.tokens, self.mask, self.documents

    @cached_property
    def places(self) -> mx.array | None:
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


class Batches:
    """Cuts examples into batches.

    An example belongs to the smallest rung that holds it. Every epoch shuffles the rows
    of each rung and the order of the batches. All batches of a rung have one size; what
    does not fill the last is filled up with rows whose mask is empty, so that no row is
    ever left out.

    Args:
        rows: rows per batch at most, or
        tokens: padded tokens per batch at most, if a row has no more; short rows then
            go in larger batches.
    """

    def __init__(
        self,
        examples: list[Example],
        *,
        max_length: int,
        rows: int | None = None,
        tokens: int | None = None,
        seed: int = 0,
    ):
        assert (rows is None) != (tokens is None)
        self.examples = examples
        self.seed = seed
        self._epoch: tuple[int, list] = (-1, [])
        self.rungs: list[tuple[int, int, np.ndarray]] = []
        lengths = np.array([len(e.tokens) - 1 for e in examples])
        low = 0
        for length in ladder(max_length):
            members = np.flatnonzero((lengths > low) & (lengths <= length))
            low = length
            if count := len(members):
                most = rows or max(1, tokens // length)
                # Even batches: 33 rows at most 32 at a time are 17 and 16.
                size = math.ceil(count / math.ceil(count / most))
                self.rungs.append((length, size, members))

    @property
    def digest(self) -> str:
        """A hash of the examples, to tell whether rows are still the same."""
        total = hashlib.sha256()
        for example in self.examples:
            total.update(example.tokens.tobytes())
            total.update(example.mask.tobytes())
        return total.hexdigest()

    @property
    def per_epoch(self) -> int:
        """Batches in one pass over the examples."""
        return sum(-(-len(m) // size) for _, size, m in self.rungs)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, counted from 0, over as many epochs as it takes."""
        epoch, position = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._shuffled(epoch))
        length, size, members = self._epoch[1][position]
        return self._collate(length, size, members)

    def in_order(self, limit: int | None = None) -> Iterator[Batch]:
        """Every batch once, unshuffled, spread over the rungs; for validation."""
        plan = [
            (start / len(members), length, size, members[start : start + size])
            for length, size, members in self.rungs
            for start in range(0, len(members), size)
        ]
        for _, length, size, members in sorted(plan, key=lambda p: p[:2])[:limit]:
            yield self._collate(length, size, members)

    def _shuffled(self, epoch: int) -> list:
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        plan = []
        for length, size, members in self.rungs:
            order = generator.permutation(members)
            plan += [
                (length, size, order[start : start + size])
                for start in range(0, len(order), size)
            ]
        return [plan[i] for i in generator.permutation(len(plan))]

    def _collate(self, length: int, size: int, members: np.ndarray) -> Batch:
        tokens = np.zeros((size, length + 1), np.int32)
        mask = np.zeros((size, length), bool)
        for row, index in enumerate(members):
            example = self.examples[index]
            count = len(example.tokens)
            tokens[row, :count] = example.tokens
            mask[row, : count - 1] = example.mask[1:]
        where = tuple(self.examples[i].where for i in members)
        return Batch(mx.array(tokens), mx.array(mask), where)
