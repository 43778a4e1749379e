"""The cache state of one sequence, with rollback for every kind of layer cache.

It also records hidden states of the tokens, which drafters read.
"""

import copy
from collections.abc import Sequence
from itertools import islice
from math import inf
from typing import Any

import mlx.core as mx

from ...errors import UserError
from ...models.hooks import forward_with_hidden_states
from ...models.loader import make_cache
from ...models.logit_errors import more_than_rounding
from ...models.lora.multi_lora import BASE, adapter_rows
from .codec import PLAIN_CODEC, Codec
from .eviction import SINKS, KVLimit, ObservedQueries
from .layer_rows import WINDOW_SLACK, AttentionRows, RowLengths
from .length_classes import replace_attention
from .rotation import PLAIN, WINDOW, RotatedCodec, key_rotations

KVBits = int | Sequence[int] | None
UNQUANTIZED = 16
"""As `kv_bits`: keys and values in the dtype of the model."""
BUFFER_STEP = 256
"""Positions by which the buffers of one sequence grow."""
CHECKED_SIZE = 2 * SINKS
"""Size of the window with which a model is checked."""
LIMIT_ERRORS = "_limit_errors"


class RecordedStates:
    """Outputs of a target's blocks for the tokens of one sequence.

    Args:
        layer_ids: the blocks, from 0.
        start: position of the first token that is recorded.
    """

    def __init__(self, layer_ids: tuple[int, ...], start: int):
        self.layer_ids = layer_ids
        self.start = self.end = start
        # Arrays [1, n, width], possibly lazy. They are joined only when they are read.
        self.arrays: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states."""
        return sum(states.nbytes for states in self.arrays)

    def append(self, states: mx.array) -> None:
        """Add the hidden states [1, n, width] of the next tokens."""
        self.arrays.append(states)
        self.end += states.shape[1]

    def trim(self, count: int) -> None:
        """Remove those of the last `count` tokens."""
        self.end -= count
        while count and self.arrays:
            last = self.arrays.pop()
            if last.shape[1] > count:
                self.arrays.append(last[:, :-count])
            count = max(0, count - last.shape[1])
        # Tokens before the first recorded one were removed.
        self.start = min(self.start, self.end)

    def since(self, position: int) -> mx.array:
        """Hidden states [1, n, width] from a position on, n >= 1."""
        assert self.start <= position < self.end
        first, parts = self.end, []
        # Only what is read is joined: a round of drafting reads the last few tokens.
        for states in reversed(self.arrays):
            first -= states.shape[1]
            parts.append(states)
            if first <= position:
                break
        joined = mx.concatenate(parts[::-1], axis=1) if len(parts) > 1 else parts[0]
        return joined[:, position - first :]


class CacheState:
    """The tokens a model has processed, with one interface for every kind of cache.

    `length` is the number of processed tokens; every layer cache agrees with it.
    Attention caches roll back by trimming. A recurrent state cannot be trimmed: it is
    restored from the checkpoint, and the accepted tokens are processed again.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        kv_bits: 2, 3, 4, 5, 6 or 8 = quantize keys and values (see `rotation`); 16 or
            None = keep the model's dtype. A sequence has the bits of every layer.
        kv_limit: of the keys and values in layers with full attention; None = all.

    Attributes:
        recorded: hidden states of the processed tokens, for drafters; see
            `record_hidden_states`.
        adapter: number of the adapter that the tokens are processed with; see
            `models.lora.multi_lora`.

    Raises:
        UserError: the keys and values of this model cannot be quantized or limited, or
            `kv_bits` has another number of layers.
    """

    def __init__(
        self, model: Any, *, kv_bits: KVBits = None, kv_limit: KVLimit | None = None
    ):
        self.model, self.kv_limit = model, kv_limit
        if kv_limit:
            _require_limit(model, kv_limit)
        # Whether the prompt goes on, which is stored whole to select of it.
        self._is_in_prompt = bool(kv_limit and kv_limit.selects)
        self._lengths = RowLengths(1)
        self.caches = self._empty_caches()
        self.recorded: RecordedStates | None = None
        self.adapter = BASE
        if layer_bits := _bits_of_layers(kv_bits, len(self.caches)):
            self._quantize(layer_bits)
        # Recurrent states at the checkpoint, and the tokens processed since then;
        # None = no checkpoint is set.
        self._checkpoint_states: list[tuple] = []
        self._tokens_since: list[mx.array] | None = None

    @property
    def length(self) -> int:
        """Processed tokens."""
        return self._lengths.values[0]

    @length.setter
    def length(self, length: int) -> None:
        self._lengths.set([length])

    @property
    def layer_caches(self) -> list:
        """All caches in a flat list; nested cache lists are expanded."""
        return flatten_caches(self.caches)

    @property
    def has_snapshot(self) -> bool:
        """Whether a layer's state holds for one length only; see `snapshot`."""
        return bool(self._other_caches())

    @property
    def has_states(self) -> bool:
        """Whether a layer has a recurrent state, which cannot be trimmed."""
        return bool(self._recurrent())

    @property
    def has_selected(self) -> bool:
        """Whether keys and values were selected, so that no other request has them."""
        return not self._is_in_prompt and bool(self.kv_limit and self.kv_limit.selects)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches and recorded hidden states."""
        leaves = [leaf for leaf in self.layer_caches if not leaf.empty()]
        recorded = self.recorded.nbytes if self.recorded else 0
        return sum(leaf.nbytes for leaf in leaves) + recorded

    def bytes_by_capacity(self) -> dict[float, float]:
        """Bytes of a token in an empty cache, by the tokens that layers have at most.

        Recurrent states are left out: they do not grow.
        """
        # Only shapes are used, so nothing is computed.
        self.forward(mx.zeros((1, 1), mx.int32))
        sizes: dict[float, float] = {}
        for leaf in self.layer_caches:
            if isinstance(leaf, AttentionRows):
                capacity = leaf.max_size + WINDOW_SLACK
                sizes[capacity] = sizes.get(capacity, 0) + leaf.position_bytes
        return sizes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the layers of `snapshot` at most, when something is stored."""
        return sum(
            int((leaf.max_size + WINDOW_SLACK) * leaf.position_bytes)
            if isinstance(leaf, AttentionRows)
            else leaf.nbytes
            for leaf in self._other_caches()
            if not leaf.empty()
        )

    def empty_copy(self) -> "CacheState":
        """An empty cache of the same kinds, quantized ones included."""
        new = copy.copy(self)
        new._lengths = RowLengths(1)
        codecs = [getattr(cache, "codec", PLAIN_CODEC) for cache in self.caches]
        new.caches = new._empty_caches(codecs)
        new.recorded, new.adapter = None, BASE
        new.commit()
        return new

    def forward(self, tokens: mx.array) -> mx.array:
        """Process tokens [1, L]; returns lazy logits [1, L, V]."""
        with adapter_rows(self.model, [self.adapter] * len(tokens)):
            if self.recorded:
                logits, states = forward_with_hidden_states(
                    self.model, tokens, self.recorded.layer_ids, cache=self.caches
                )
                self.recorded.append(states)
            else:
                logits = self.model(tokens, cache=self.caches)
        self.length += tokens.shape[1]
        if self._tokens_since is not None:
            self._tokens_since.append(tokens)
        self._check_offsets()
        return logits

    def prefill(self, tokens: mx.array, *, step_size: int) -> None:
        """Process prompt tokens [1, L] in chunks of `step_size`.

        The logits are never evaluated, so the LM head costs nothing.
        """
        for start in range(0, tokens.shape[1], step_size):
            self.forward(tokens[:, start : start + step_size])
            self.evaluate()
            mx.clear_cache()

    def end_prompt(self) -> None:
        """Select the keys and values that are kept of a prompt, if the limit does so.

        The tokens so far must have been processed by this cache, or as many of them as
        `KVLimit.reusable` says. They cannot be removed any more.
        """
        if not self._is_in_prompt:
            return
        self._is_in_prompt = False
        for leaf in self._growing():
            leaf.become_window(self.kv_limit.max_size, SINKS)
        self.commit()
        self.evaluate(wait=False)

    def record_hidden_states(self, layer_ids: Sequence[int]) -> None:
        """Record the outputs of these blocks for all tokens processed from here on.

        Those that were recorded before, or restored with the cache, are kept.
        """
        if self.recorded is None or self.recorded.layer_ids != tuple(layer_ids):
            self.recorded = RecordedStates(tuple(layer_ids), self.length)

    def checkpoint(self) -> None:
        """Set a checkpoint: tokens processed from here on can be rolled back."""
        self._checkpoint_states = [_copy(leaf.state) for leaf in self._recurrent()]
        self._tokens_since = []

    def commit(self) -> None:
        """Keep all processed tokens and drop the checkpoint."""
        self._checkpoint_states, self._tokens_since = [], None

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens, all processed since the checkpoint."""
        since = sum(tokens.shape[1] for tokens in self._tokens_since or [])
        assert 0 <= count <= since, f"rollback of {count}, {since} since the checkpoint"
        if not count:
            return
        accepted = mx.concatenate(self._tokens_since, axis=1)[:, : since - count]
        recurrent = self._recurrent()
        # Before tokens are processed again, all layers must be at the checkpoint.
        trimmed = since if recurrent else count
        assert all(_can_trim(leaf, trimmed) for leaf in self._attention())
        for leaf in self._foreign():
            leaf.trim(trimmed)
        for leaf, state in zip(recurrent, self._checkpoint_states, strict=True):
            leaf.state = _copy(state)
        self._drop(trimmed)
        self._tokens_since = [accepted] if not recurrent and accepted.size else []
        if recurrent and accepted.size:
            self.forward(accepted)
        self._check_offsets()

    def trim(self, count: int) -> bool:
        """Remove the last `count` tokens, without a checkpoint.

        Returns:
            False, with the state unchanged, if a cache cannot be trimmed that far.
        """
        if not all(_can_trim(leaf, count) for leaf in self.layer_caches):
            return False
        for leaf in self._foreign() if count else []:
            leaf.trim(count)
        self._drop(count)
        self.commit()
        self._check_offsets()
        return True

    def evaluate(self, *, wait: bool = True) -> None:
        """Evaluate the caches and recorded hidden states only, not the logits."""
        recorded = self.recorded.arrays if self.recorded else []
        evaluate = mx.eval if wait else mx.async_eval
        evaluate([cache.state for cache in self.layer_caches], recorded)

    @property
    def kinds(self) -> list[str]:
        """The kind of every layer's cache; also bits and rotation of quantized ones."""
        return [
            leaf.name if isinstance(leaf, AttentionRows) else type(leaf).__name__
            for leaf in self.layer_caches
        ]

    def positions(self, start: int, end: int) -> list[mx.array]:
        """Copies of keys and values [1, H, n, D] at these positions, by layer.

        Only full attention has them, as one array or as codes, scales and biases.
        """
        return [part for leaf in self._growing() for part in leaf.entries(start, end)]

    def snapshot(self) -> list:
        """The states of all other layers, which hold only for this length."""
        return [
            (leaf.entries(leaf.first, self.length), leaf.first)
            if isinstance(leaf, AttentionRows)
            else _copy(leaf.state)
            for leaf in self._other_caches()
        ]

    def restore(
        self, positions: Sequence[mx.array], snapshot: list, length: int
    ) -> None:
        """Fill an empty cache with all positions and a snapshot of another one."""
        assert not self.length
        parts = iter(positions)
        for leaf in self._growing():
            leaf.restore([*islice(parts, leaf.codec.arrays)], 0, length)
        for leaf, state in zip(self._other_caches(), snapshot, strict=True):
            if isinstance(leaf, AttentionRows):
                leaf.restore(*state, length)
            else:
                leaf.state = _copy(state)
        self.length = length
        self._check_offsets()

    def _growing(self) -> list[AttentionRows]:
        return [leaf for leaf in self.layer_caches if _grows(leaf)]

    def _other_caches(self) -> list:
        return [leaf for leaf in self.layer_caches if not _grows(leaf)]

    def _drop(self, count: int) -> None:
        """Count `count` tokens less."""
        self.length -= count
        if self.recorded:
            self.recorded.trim(count)

    def _recurrent(self) -> list:
        return [leaf for leaf in self.layer_caches if _is_recurrent(leaf)]

    def _attention(self) -> list:
        return [leaf for leaf in self.layer_caches if not _is_recurrent(leaf)]

    def _foreign(self) -> list:
        """Attention caches of mlx-lm, which count their tokens themselves."""
        return [c for c in self._attention() if not isinstance(c, AttentionRows)]

    def _check_offsets(self) -> None:
        for leaf in self.layer_caches:
            offset = getattr(leaf, "offset", self.length)
            assert offset == self.length, f"{type(leaf).__name__} is at {offset}"
        assert self.recorded is None or self.recorded.end == self.length

    def _quantize(self, layer_bits: Sequence[int]) -> None:
        """Use empty quantized caches."""
        try:
            rotations = key_rotations(self.model)
            if not any(rotations):
                raise TypeError("it has no attention cache")
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"this model's keys and values cannot be quantized: {error}",
                hint="keep the model's dtype: kv_bits 16, or no kv_bits",
            ) from error
        self.caches = self._empty_caches(
            [
                RotatedCodec(rotation, bits)
                if rotation and bits != UNQUANTIZED
                else PLAIN_CODEC
                for rotation, bits in zip(rotations, layer_bits, strict=True)
            ]
        )

    def _empty_caches(self, codecs: Sequence[Codec] | None = None) -> list:
        caches = make_cache(self.model)
        codecs = codecs or [PLAIN_CODEC] * len(caches)
        return [*map(self._empty, caches, codecs)]

    def _empty(self, cache: Any, codec: Codec) -> Any:
        """Rows in place of mlx-lm's KVCache and RotatingKVCache."""
        kind = type(cache).__name__
        if kind == PLAIN or (kind == WINDOW and not cache.keep):
            size = inf if kind == PLAIN else cache.max_size
            rows = AttentionRows(self._lengths, codec, size, step=BUFFER_STEP)
            if kind == PLAIN and self._is_in_prompt:
                rows.observed = ObservedQueries()
            elif kind == PLAIN and self.kv_limit:
                rows.become_window(self.kv_limit.max_size, SINKS)
            return rows
        if hasattr(cache, "caches"):
            cache.caches = tuple(self._empty(c, PLAIN_CODEC) for c in cache.caches)
        return cache


def _bits_of_layers(kv_bits: KVBits, count: int) -> list[int]:
    """The bits of every layer's cache; empty if all keep the dtype of the model.

    Raises:
        UserError: there are bits for another number of layers.
    """
    if isinstance(kv_bits, Sequence):
        bits = list(kv_bits)
    else:
        bits = [kv_bits or UNQUANTIZED] * count
    if len(bits) != count:
        raise UserError(
            f"there are KV-cache bits for {len(bits)} layers, and the model has {count}"
        )
    return bits if any(bit != UNQUANTIZED for bit in bits) else []


def _require_limit(model: Any, limit: KVLimit) -> None:
    """Refuse a model whose keys and values cannot be limited.

    Raises:
        UserError: with the reason.
    """
    errors = model.__dict__.get(LIMIT_ERRORS, {})
    if limit.selects not in errors:
        errors[limit.selects] = _limit_error(model, selects=limit.selects)
        object.__setattr__(model, LIMIT_ERRORS, errors)
    if error := errors[limit.selects]:
        raise UserError(
            f"the keys and values of this model cannot be limited: {error}",
            hint="use the policy window" if limit.selects else "omit max_kv_size",
        )


def _limit_error(model: Any, *, selects: bool) -> str | None:
    """What of a limit a model does not follow; None = nothing.

    A changed entry outside of a window must not change the logits: some architectures
    of mlx-lm apply no mask to a single token.
    """
    state, tokens = CacheState(model), mx.arange(1, 2 * CHECKED_SIZE + 1)[None]
    if not (leaves := state._growing()):
        return "none of its layers has full attention"
    replace_attention()
    for leaf in leaves:
        leaf.observed = ObservedQueries()
    state.forward(tokens)
    if selects and not all(leaf.observed.belongs_to(leaf.keys) for leaf in leaves):
        return "the queries of its attention are not those of its keys (snapkv)"
    for leaf in leaves:
        leaf.observed = None
        leaf.become_window(CHECKED_SIZE, SINKS)
    state.checkpoint()

    def logits() -> list[mx.array]:
        found = [state.forward(tokens[:, :count]) for count in (2, 1)]
        mx.eval(found)
        state.rollback(3)
        return found

    try:
        expected = logits()
        for change in (100, -200):
            for buffer in [part for leaf in leaves for part in leaf.buffers[0]]:
                buffer[:, :, SINKS + 1] += change
            if any(map(more_than_rounding, logits(), expected)):
                return "it also attends to tokens outside of a window"
    except (AttributeError, TypeError, ValueError) as error:
        return f"a window is not computed: {error}"
    return None


def flatten_caches(caches: Sequence) -> list:
    """All caches in a flat list; nested cache lists are expanded."""
    return [
        leaf
        for cache in caches
        for leaf in (
            flatten_caches(cache.caches) if hasattr(cache, "caches") else [cache]
        )
    ]


def _grows(leaf) -> bool:
    """Whether a cache keeps the keys and values of all positions."""
    return isinstance(leaf, AttentionRows) and leaf.max_size == inf


def _is_recurrent(leaf) -> bool:
    return not hasattr(leaf, "update_and_fetch")


def _can_trim(leaf, count: int) -> bool:
    if not count:
        return True
    if isinstance(leaf, AttentionRows):
        return leaf.can_trim(count)
    # mlx-lm's chunked cache drops its front once it starts at a position other than 0.
    return not _is_recurrent(leaf) and not getattr(leaf, "start_position", 0)


def _copy(state):
    """A copy of a cache state; needed because caches write arrays in place."""
    if isinstance(state, list | tuple):
        return type(state)(_copy(part) for part in state)
    return mx.array(state) if isinstance(state, mx.array) else state
