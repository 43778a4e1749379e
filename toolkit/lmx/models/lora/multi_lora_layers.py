"""Layers with several LoRA adapters, of which each row of a batch has its own.

Rows with different adapters share two products: the matrices A of all adapters side by
side, and their B one below the other. What a row gets from adapters of others is masked
between them. Experts choose among the matrices of all adapters instead.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn


@dataclass
class AdapterRows:
    """The adapters of the rows in the pass that runs; shared by all layers.

    Attributes:
        numbers: of every row; empty = all rows have the model's own weights.
        last: those of the last pass with adapters.
        order: the places of `last` among its distinct numbers, ascending [B], uint32.
    """

    numbers: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    order: mx.array | None = None

    @property
    def distinct(self) -> int:
        """How many numbers the rows have; 0 = they have the same one."""
        count = len({*self.numbers})
        return count if count > 1 else 0

    def begin(self, numbers: Sequence[int]) -> None:
        """Begin a pass; `end` ends it."""
        # Layers compare by identity whether the rows are those of the pass before.
        if self.last != tuple(numbers):
            self.last, distinct = tuple(numbers), sorted({*numbers})
            self.order = mx.array([distinct.index(n) for n in numbers], mx.uint32)
        self.numbers = self.last

    def end(self) -> None:
        """The next pass has no adapters."""
        self.numbers = ()


@dataclass(frozen=True)
class JoinedAdapters:
    """The adapters of some rows in one layer.

    Attributes:
        rows: the numbers for which they are joined.
        a: [in, R], of all adapters side by side.
        b: [R, out].
        mask: which of the R columns a row has [B, R]; None = all rows have all.
    """

    rows: tuple[int, ...]
    a: mx.array
    b: mx.array
    mask: mx.array | None


@dataclass
class LayerAdapters:
    """The adapters of a layer by number: A [in, rank] and scale * B [rank, out]."""

    weights: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)
    joined: JoinedAdapters | None = None

    def add_adapter(self, number: int, a: mx.array, b: mx.array) -> None:
        """Add A [in, rank] and scale * B [rank, out]."""
        mx.eval(a, b)
        self.weights[number] = a, b

    def remove_adapter(self, number: int) -> None:
        """Free an adapter."""
        self.weights.pop(number, None)
        self.joined = None

    def for_rows(self, rows: tuple[int, ...]) -> JoinedAdapters | None:
        """The adapters of rows, kept for the next pass; None if no row has one."""
        if self.joined is None or self.joined.rows is not rows:
            numbers = sorted({*rows} & self.weights.keys())
            if not numbers:
                return None
            pairs = [self.weights[number] for number in numbers]
            if len({*rows}) == 1:
                self.joined = JoinedAdapters(rows, *pairs[0], None)
                return self.joined
            a = mx.concatenate([a for a, _ in pairs], axis=1)
            b = mx.concatenate([b for _, b in pairs])
            sizes = zip(numbers, pairs, strict=True)
            owners = [number for number, (_, b) in sizes for _ in range(len(b))]
            mask = mx.array(rows)[:, None] == mx.array(owners)
            self.joined = JoinedAdapters(rows, a, b, mask)
        return self.joined


class MultiLoRALinear(nn.Module):
    """A frozen linear layer plus, for each row, (x A) B of the row's adapter."""

    def __init__(self, linear: nn.Module, rows: AdapterRows):
        super().__init__()
        self.linear = linear
        # No parameters of the model.
        self._rows, self._adapters = rows, LayerAdapters()

    @property
    def adapters(self) -> LayerAdapters:
        """Its adapters."""
        return self._adapters

    def __call__(self, x: mx.array) -> mx.array:
        y, rows = self.linear(x), self._rows.numbers
        joined = self._adapters.for_rows(rows) if rows else None
        if joined is None:
            return y
        update = x @ joined.a
        if joined.mask is not None:
            mask = joined.mask
            if x.ndim == 2:
                # The tokens of all rows, one row after the other.
                mask = mx.repeat(mask, len(x) // len(rows), axis=0)
            mask = mask.reshape(len(mask), *[1] * (x.ndim - 2), mask.shape[1])
            # Not a product: what is masked may be infinite.
            update = mx.where(mask, update, mx.zeros((), update.dtype))
        return y + (update @ joined.b).astype(y.dtype)


@dataclass(frozen=True)
class ChosenAdapters:
    """The adapters of some rows in a layer of experts.

    Attributes:
        rows: the numbers for which they are chosen.
        slots: of their distinct numbers, in ascending order, uint32 [n]. That of a
            number without an adapter in the layer is any that keeps the order.
        mask: which of them have an adapter [n]; None = all.
    """

    rows: tuple[int, ...]
    slots: mx.array
    mask: mx.array | None


@dataclass
class ExpertAdapters:
    """The adapters of a layer of experts.

    The matrices of expert e and slot s are at e * slots + s. Those of all adapters have
    the highest rank, with zeros.

    Attributes:
        ranks: by number; the order is that of the slots, and is ascending.
        a: [experts * slots, rank, in].
        b: scale * B, [experts * slots, out, rank].
    """

    ranks: dict[int, int] = field(default_factory=dict)
    a: mx.array | None = None
    b: mx.array | None = None
    chosen: ChosenAdapters | None = None

    def add_adapter(self, number: int, a: mx.array, b: mx.array) -> None:
        """Add A [experts, rank, in] and scale * B [experts, out, rank]."""
        self._stack(self._pairs() | {number: (a, b)})

    def remove_adapter(self, number: int) -> None:
        """Free an adapter. The others are copied."""
        if number in self.ranks:
            pairs = self._pairs()
            del pairs[number]
            self._stack(pairs)

    def for_rows(self, rows: tuple[int, ...]) -> ChosenAdapters | None:
        """The adapters of rows, kept for the next pass; None if no row has one."""
        if self.chosen is None or self.chosen.rows is not rows:
            present, numbers = [*self.ranks], sorted({*rows})
            has = [number in self.ranks for number in numbers]
            if not any(has):
                return None
            slots = [max(bisect_right(present, n) - 1, 0) for n in numbers]
            mask = None if all(has) else mx.array(has)
            self.chosen = ChosenAdapters(rows, mx.array(slots, mx.uint32), mask)
        return self.chosen

    def _pairs(self) -> dict[int, tuple[mx.array, mx.array]]:
        slots = len(self.ranks)
        return {
            number: (self.a[slot::slots, :rank], self.b[slot::slots, :, :rank])
            for slot, (number, rank) in enumerate(self.ranks.items())
        }

    def _stack(self, pairs: dict[int, tuple[mx.array, mx.array]]) -> None:
        self.ranks = {number: a.shape[1] for number, (a, _) in pairs.items()}
        self.chosen = self.a = self.b = None
        if not pairs:
            return
        full, stacks = max(self.ranks.values()), ([], [])
        for a, b in pairs.values():
            missing = (0, full - a.shape[1])
            stacks[0].append(mx.pad(a, [(0, 0), missing, (0, 0)]))
            stacks[1].append(mx.pad(b, [(0, 0), (0, 0), missing]))
        self.a, self.b = (mx.stack(m, axis=1).flatten(0, 1) for m in stacks)
        mx.eval(self.a, self.b)


class MultiLoRAExperts(nn.Module):
    """Frozen experts plus, for each row, B A x of the row's adapter.

    Indices of a pass with several adapters are those of `ExpertsByRow`.
    """

    def __init__(self, linear: nn.Module, rows: AdapterRows):
        super().__init__()
        self.linear = linear
        # No parameters of the model.
        self._rows, self._adapters = rows, ExpertAdapters()

    @property
    def adapters(self) -> ExpertAdapters:
        """Its adapters."""
        return self._adapters

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False):
        numbers, adapters, of_row = self._rows.numbers, self._adapters, None
        if count := self._rows.distinct:
            indices, of_row = indices // count, indices % count
        y = self.linear(x, indices, sorted_indices=sorted_indices)
        chosen = adapters.for_rows(numbers) if numbers else None
        if chosen is None:
            return y
        slots = chosen.slots if of_row is None else chosen.slots[of_row]
        # Slots ascend with numbers: what is sorted by expert and number stays sorted.
        options = {
            "rhs_indices": indices * len(adapters.ranks) + slots,
            "sorted_indices": sorted_indices,
        }
        update = mx.gather_mm(x, adapters.a.swapaxes(1, 2), **options)
        if chosen.mask is not None:
            mask = chosen.mask[of_row][..., None, None]
            update = mx.where(mask, update, mx.zeros((), update.dtype))
        update = mx.gather_mm(update, adapters.b.swapaxes(1, 2), **options)
        return y + update.astype(y.dtype)


class ExpertsByRow:
    """A group of experts that tells its layers the row's adapter of every token.

    The group may sort the tokens, and its layers see no rows. So indices become
    expert * n + adapter, of n distinct adapters: sorted by them, experts are sorted.
    """

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = self._adapter_rows
        if rows.distinct:
            # Tokens of a row are neighbours, with an axis of their own or without.
            by_row = indices.reshape(len(rows.numbers), -1) * rows.distinct
            indices = (by_row + rows.order[:, None]).reshape(indices.shape)
        return super().__call__(x, indices)
