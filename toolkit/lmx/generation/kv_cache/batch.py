"""The caches of a batch: every sequence is a row with a length of its own.

New positions are written at the length of each row, and masks hide what is behind it.
So a rollback is a smaller length, and rows join and leave without a copy of the others.
(mlx-lm pads rows on the left, and must move them when they fall back unequally.)
"""

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...models.hooks import forward_with_hidden_states
from ...models.logit_errors import more_than_rounding
from ...models.lora.multi_lora import adapter_rows
from .layer_rows import WINDOW_SLACK, AttentionRows, RecurrentRows, RowLengths
from .length_classes import FREE_POSITIONS, class_for, replace_attention
from .sequence import CacheState, RecordedStates

PROMPTS = [1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]
"""Two prompts of a check, whose rows have unequal lengths in a batch."""
CHECKED = "_batch_errors"


class OneRow:
    """The cache of one sequence, as a batch of one row. It serves every kind of cache.

    Args:
        state: of the sequence.
    """

    def __init__(self, state: CacheState):
        self._state = state

    @property
    def lengths(self) -> list[int]:
        """Processed tokens of the row."""
        return [self._state.length]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers and recorded hidden states."""
        return self._state.nbytes

    def forward(self, tokens: mx.array, counts: Sequence[int] | None = None):
        """Process tokens [1, N] as `CacheBatch.forward` does; returns their logits."""
        if counts is not None:
            self._state.checkpoint()
        return self._state.forward(tokens)

    def rollback(self, counts: Sequence[int]) -> None:
        """Remove the last tokens of the row, all of the last pass."""
        self._state.rollback(*counts)
        self._state.commit()

    def checkpoint(self) -> None:
        """Let `trim` remove what comes from here on."""
        self._state.checkpoint()

    def trim(self, counts: Sequence[int]) -> None:
        """Remove the last tokens of the row, of a model of any kind."""
        if not self._state.trim(*counts):
            self.rollback(counts)

    def extract(self, row: int) -> CacheState:
        """The cache of the row."""
        assert not row
        return self._state


class CacheBatch:
    """Caches of B sequences that a model processes together.

    Args:
        first: the first sequence.
        free_positions: rows have buffers by length class, see `class_for`; None = all
            rows are in one class.

    Attributes:
        recorded: hidden states of every row, for drafters; None = not recorded.
        adapters: number of the adapter of every row.

    Raises:
        UserError: a layer has a kind of cache that holds one sequence only.
    """

    def __init__(self, first: CacheState, *, free_positions: int | None = None):
        self.model = first.model
        self._empty = first.empty_copy()
        self._free_positions = free_positions
        self._rows = RowLengths()
        # Where every row is in the layers, which order them by length class.
        self._places: list[int] = []
        self._layers: list[AttentionRows | RecurrentRows] = []
        self.caches = [self._of(cache) for cache in first.caches]
        self.recorded: list[RecordedStates | None] = []
        self.adapters: list[int] = []
        # Tokens, lengths and recurrent states before the last pass, for `rollback`.
        self._last: tuple[mx.array, list[int], list] | None = None
        self.join(first)

    @property
    def lengths(self) -> list[int]:
        """Processed tokens of every row."""
        return [self._rows.values[place] for place in self._places]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers and recorded hidden states."""
        recorded = sum(states.nbytes for states in self.recorded if states)
        return sum(layer.nbytes for layer in self._layers) + recorded

    def join(self, state: CacheState) -> None:
        """Add a copy of a sequence as the last row."""
        rows, values = self._rows, [*self._rows.values]
        classes = [each.lengths for each in rows.classes]
        index = 0
        if self._free_positions is not None:
            index = class_for(state.length, classes, self._free_positions)
        if index == len(classes):
            rows.sizes.append(0)
        place = sum(rows.sizes[: index + 1])
        rows.sizes[index] += 1
        for layer, leaf in zip(self._layers, state.layer_caches, strict=True):
            layer.join(leaf, place if layer.is_recurrent else index)
        rows.set([*values[:place], state.length, *values[place:]])
        self._places = [p + (p >= place) for p in self._places] + [place]
        self.recorded.append(state.recorded)
        self.adapters.append(state.adapter)
        self._last = None

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        rows, place = self._rows, self._places[row]
        index = next(i for i, each in enumerate(rows.classes) if place < each.end)
        last = rows.classes[index].end - 1
        for layer in self._layers:
            layer.leave(place, *([last] if layer.is_recurrent else []))
        values, places = [*rows.values], self._places
        values[place] = values[last]
        rows.sizes[index] -= 1
        if not rows.sizes[index]:
            del rows.sizes[index]
        rows.set(values[:last] + values[last + 1 :])
        places[places.index(last)] = place
        for values in (places, self.recorded, self.adapters):
            values[row] = values[-1]
        self.recorded.pop()
        self.adapters.pop()
        self._places = [p - (p > last) for p in places[:-1]]
        self._last = None

    def extract(self, row: int) -> CacheState:
        """A copy of a row as the cache of one sequence."""
        state, place = self._empty.empty_copy(), self._places[row]
        length = self._rows.values[place]
        for layer, leaf in zip(self._layers, state.layer_caches, strict=True):
            layer.extract(place, leaf, length)
        state.length, state.recorded = length, self.recorded[row]
        state.adapter = self.adapters[row]
        return state

    def forward(
        self, tokens: mx.array, counts: Sequence[int] | None = None
    ) -> mx.array:
        """Process tokens [B, N]; returns lazy logits [B, N, V].

        Args:
            counts: the tokens of every row, which are the first ones; the others are
                padding. None = all, and they cannot be rolled back.
        """
        states = [list(layer.arrays.cache) for layer in self._recurrent]
        self._last = None if counts is None else (tokens, self.lengths, states)
        counts = [tokens.shape[1]] * len(self._places) if counts is None else counts
        if not any(self.recorded):
            return self._process(tokens, counts, self.model)
        layer_ids = next(r.layer_ids for r in self.recorded if r)
        run = partial(forward_with_hidden_states, self.model, layer_ids=layer_ids)
        logits, hidden = self._process(tokens, counts, run)
        for row, recorded in enumerate(self.recorded):
            if recorded:
                recorded.append(hidden[row : row + 1, : counts[row]])
        return logits

    def rollback(self, counts: Sequence[int]) -> None:
        """Remove the last `counts` tokens of every row, all of the last pass."""
        if not any(counts):
            return
        tokens, before, states = self._last
        after = [n - count for n, count in zip(self.lengths, counts, strict=True)]
        for recorded, count in zip(self.recorded, counts, strict=True):
            if recorded:
                recorded.trim(count)
        if not states:
            self._set_lengths(after)
            return
        # A recurrent state cannot be cut: the kept tokens are processed again.
        for layer, state in zip(self._recurrent, states, strict=True):
            layer.arrays.cache = list(state)
        kept = [new - old for new, old in zip(after, before, strict=True)]
        self._set_lengths(before)
        if any(kept):
            self._process(tokens[:, : max(kept)], kept, self.model)
            mx.async_eval([layer.arrays.cache for layer in self._recurrent])

    @property
    def _recurrent(self) -> list[RecurrentRows]:
        return [layer for layer in self._layers if layer.is_recurrent]

    def checkpoint(self) -> None:
        """Let `trim` remove what comes from here on. It can without."""

    def trim(self, counts: Sequence[int]) -> None:
        """Remove the last `counts` tokens of every row, of a model without states."""
        assert not self._recurrent
        lengths = zip(self.lengths, counts, strict=True)
        self._set_lengths([n - count for n, count in lengths])

    def _process(
        self, tokens: mx.array, counts: Sequence[int], run: Callable
    ) -> mx.array | tuple:
        """What the model gives for the rows. They are computed in the layers' order."""
        places = mx.array(self._places)
        is_ordered = self._places == sorted(self._places)
        if not is_ordered:
            tokens = tokens[mx.argsort(places)]
        for layer in self._recurrent:
            layer.begin(tokens.shape[1], self._in_order(counts))
        with adapter_rows(self.model, self._in_order(self.adapters)):
            outputs = run(tokens, cache=self.caches)
        lengths = zip(self.lengths, counts, strict=True)
        self._set_lengths([n + count for n, count in lengths])
        for layer in self._recurrent:
            layer.end()
        if is_ordered:
            return outputs
        if isinstance(outputs, tuple):
            return tuple(output[places] for output in outputs)
        return outputs[places]

    def _in_order(self, values: Sequence[int]) -> list[int]:
        """Values of all rows in the order of the layers."""
        pairs = sorted(zip(self._places, values, strict=True))
        return [value for _, value in pairs]

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self._rows.set(self._in_order(lengths))

    def _of(self, cache: Any) -> Any:
        """What the model sees of a layer: its rows, in the nesting of its cache."""
        if hasattr(cache, "caches"):
            nested = copy.copy(cache)
            nested.caches = tuple(self._of(inner) for inner in cache.caches)
            return nested
        kind = type(cache).__name__
        if kind == "ArraysCache":
            layer = RecurrentRows(cache)
        elif isinstance(cache, AttentionRows):
            keep = cache.keep
            layer = AttentionRows(self._rows, cache.codec, cache.max_size, keep=keep)
        else:
            raise UserError(f"a {kind} holds one sequence only")
        self._layers.append(layer)
        return layer.arrays if layer.is_recurrent else layer


def join(rows: OneRow | CacheBatch | None, state: CacheState) -> OneRow | CacheBatch:
    """Rows with one more sequence, the last one.

    What was joined must not be used any more, but to join it again.

    Raises:
        UserError: see `CacheBatch`.
    """
    if rows is None:
        return OneRow(state)
    if isinstance(rows, OneRow):
        first = rows.extract(0)
        free_positions = FREE_POSITIONS if takes_classes(first.model) else None
        rows = CacheBatch(first, free_positions=free_positions)
    rows.join(state)
    return rows


def padded(parts: Sequence[Sequence[int]]) -> tuple[mx.array, list[int]]:
    """Tokens [B, N] of rows, padded on the right, and the number of each row."""
    width = max(map(len, parts))
    return mx.array([[*p, *[0] * (width - len(p))] for p in parts]), [*map(len, parts)]


def is_batchable(model: Any) -> bool:
    """Whether a model computes the same for a sequence in a batch as alone."""
    return batch_error(model) is None


def require_batchable(model: Any) -> None:
    """Refuse a model that does not.

    Raises:
        UserError: what differs.
    """
    if error := batch_error(model):
        raise UserError(
            f"this model cannot decode several sequences together: {error}",
            hint="generate one completion at a time",
        )


def takes_padding(model: Any) -> bool:
    """Whether a batchable model also leaves padding out of its recurrent states.

    Rounds of drafts have unequal lengths. Some architectures of mlx-lm apply no mask.
    """
    return _errors(model)[:2] == (None, None)


def max_padded_width(state: CacheState) -> int:
    """The most tokens of a row in a pass with padding, beside others of this kind.

    The ring of a window takes no more at once. Queries are observed of one row.
    """
    is_observed = state.kv_limit and state.kv_limit.selects
    if is_observed or not takes_padding(state.model):
        return 0
    sizes = [getattr(leaf, "max_size", inf) for leaf in state.layer_caches]
    has_window = min(sizes, default=inf) < inf
    return WINDOW_SLACK if has_window else sys.maxsize


def takes_classes(model: Any) -> bool:
    """Whether the attention of a batchable model takes rows by length class.

    Multi-head latent attention computes more with the keys than mlx-lm's function does.
    """
    return _errors(model)[2] is None


def batch_error(model: Any) -> str | None:
    """What differs when a model computes two sequences together; None = nothing.

    Some architectures of mlx-lm apply masks or positions of one sequence to a batch.
    Two prompts of unequal lengths are processed alone and together, with a rollback.
    """
    return _errors(model)[0]


def _errors(model: Any) -> tuple[str | None, ...]:
    """Errors without padding, with it, and by length class. The model keeps them."""
    if CHECKED not in model.__dict__:
        replace_attention()
        kinds = {}, {"padded": True}, {"free_positions": 0}
        errors = tuple(_batch_error(model, **kind) for kind in kinds)
        object.__setattr__(model, CHECKED, errors)
    return model.__dict__[CHECKED]


def _batch_error(
    model: Any, *, padded: bool = False, free_positions: int | None = None
) -> str | None:
    alone, states = [], []
    for prompt in PROMPTS:
        tokens = mx.array([prompt])
        alone.append(CacheState(model).forward(tokens)[:, -1])
        states.append(CacheState(model))
        states[-1].forward(tokens[:, :-2])
    try:
        batch = CacheBatch(states[0], free_positions=free_positions)
        batch.join(states[1])
        # The first row has a token and padding; of the second one a token is removed.
        # Recurrent layers then process one token of each again, without padding.
        tokens = mx.array([[prompt[-2], prompt[-1]] for prompt in PROMPTS])
        batch.forward(tokens, [1, 2])
        if not padded:
            batch.rollback([0, 1])
        together = batch.forward(mx.array([prompt[-1:] for prompt in PROMPTS]))[:, -1]
        if padded:
            together, alone = together[:1], alone[:1]
        error = more_than_rounding(together, mx.concatenate(alone))
        return error and f"the logits of one of them are {error}"
    except (AttributeError, TypeError, ValueError, UserError) as broken:
        return f"not computed: {broken}"
