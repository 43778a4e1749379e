"""The cache state of one sequence, with rollback for every kind of layer cache."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...errors import UserError
from ...models.hooks import forward_with_hidden_states
from ...models.loader import make_cache
from .recorded_states import RecordedStates
from .rotation import (
    PLAIN,
    KeyRotation,
    RotatedKVCache,
    key_rotations,
    rotated_cache,
)
from .window import WindowCache

QUANTIZED = "RotatedKVCache"
GROWING = PLAIN, QUANTIZED
KVBits = int | Sequence[int] | None
# The kind of recorded hidden states in `CacheState.state`, where they come last.
HIDDEN_STATES = "HiddenStates"
UNQUANTIZED = 16
"""As `kv_bits`: keys and values in the dtype of the model."""


class CacheState:
    """The tokens a model has processed, with one interface for every kind of cache.

    `length` is the number of processed tokens; every layer cache agrees with it.
    Attention caches roll back by trimming. A recurrent state cannot be trimmed: it is
    restored from the checkpoint, and the accepted tokens are processed again.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        kv_bits: 2, 3, 4, 5, 6 or 8 = quantize keys and values (see `rotation`); 16 or
            None = keep the model's dtype. A sequence has the bits of every layer.
            Sliding-window caches are small and never quantized.
        quantized_kv_start: number of tokens from which on the cache is quantized.

    Attributes:
        recorded: hidden states of the processed tokens, for drafters; see
            `record_hidden_states`.

    Raises:
        UserError: the keys and values of this model cannot be quantized, or `kv_bits`
            has another number of layers.
    """

    def __init__(
        self, model: Any, *, kv_bits: KVBits = None, quantized_kv_start: int = 0
    ):
        self.model = model
        self.caches = self._plain_caches()
        self.length = 0
        self.recorded: RecordedStates | None = None
        self._layer_bits = _bits_of_layers(kv_bits, len(self.caches))
        self._quantized_kv_start = quantized_kv_start
        self._quantized_caches: list = []
        if self._layer_bits:
            self._prepare_quantized()
        # Recurrent states at the checkpoint, and the tokens processed since then;
        # None = no checkpoint is set.
        self._checkpoint_states: list[tuple] = []
        self._tokens_since: list[mx.array] | None = None

    @property
    def layer_caches(self) -> list:
        """All caches in a flat list; nested cache lists are expanded."""
        return flatten_caches(self.caches)

    @property
    def quantized_caches(self) -> list:
        """Empty caches of the kinds that these have once they are quantized."""
        return self._quantized_caches or self.caches

    @property
    def has_states(self) -> bool:
        """Whether a layer has a recurrent state, which cannot be trimmed."""
        return bool(self._recurrent())

    @property
    def nbytes(self) -> int:
        """Bytes of all caches and recorded hidden states."""
        leaves = [leaf for leaf in self.layer_caches if not leaf.empty()]
        recorded = self.recorded.nbytes if self.recorded else 0
        return sum(leaf.nbytes for leaf in leaves) + recorded

    def bytes_per_token(self) -> float:
        """What every token adds to an empty cache once it is quantized.

        Sliding windows and recurrent states are left out: they stop growing.
        """
        # Only shapes are used, so nothing is computed.
        self.forward(mx.zeros((1, 1), mx.int32))
        if self._layer_bits:
            self._quantize()
        growing = [c for c in self.layer_caches if type(c).__name__ in GROWING]
        arrays = tree_flatten([(c.keys, c.values) for c in growing])
        return sum(value.nbytes / value.shape[2] for _, value in arrays)

    def empty_copy(self) -> "CacheState":
        """An empty cache of the same kinds, quantized ones included."""
        new = copy.copy(self)
        new.caches = [*map(_like, self._plain_caches(), self.quantized_caches)]
        new.length, new.recorded = 0, None
        new.commit()
        return new

    def forward(self, tokens: mx.array) -> mx.array:
        """Process tokens [B, L]; returns lazy logits [B, L, V]."""
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
        if self._layer_bits and self.length > self._quantized_kv_start:
            self._quantize()
        self._check_offsets()
        return logits

    def prefill(self, tokens: mx.array, *, step_size: int) -> None:
        """Process prompt tokens [B, L] in chunks of `step_size`.

        The logits are never evaluated, so the LM head costs nothing.
        """
        for start in range(0, tokens.shape[1], step_size):
            self.forward(tokens[:, start : start + step_size])
            self.evaluate()
            mx.clear_cache()

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
        for leaf in self.layer_caches:
            if not _is_recurrent(leaf):
                assert leaf.trim(trimmed) == trimmed
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
        for leaf in self.layer_caches if count else []:
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
    def state(self) -> list[tuple[str, tuple]]:
        """Class name and state of every cache, copied; recorded states come last."""
        state = [(type(leaf).__name__, _copy(leaf.state)) for leaf in self.layer_caches]
        return (
            [*state, (HIDDEN_STATES, self.recorded.state)] if self.recorded else state
        )

    def restore(self, state: list[tuple[str, tuple]], length: int) -> None:
        """Restore the state and length of another cache of the same model.

        Raises:
            UserError: the state belongs to other kinds of cache.
        """
        self.recorded = None
        if state and state[-1][0] == HIDDEN_STATES:
            *state, (_, recorded) = state
            self.recorded = RecordedStates.from_state(recorded)
        stored = iter(kind for kind, _ in state)
        self.caches = [
            self._of_kinds(
                i, cache, [next(stored, None) for _ in flatten_caches([cache])]
            )
            for i, cache in enumerate(self._plain_caches())
        ]
        kinds = [type(leaf).__name__ for leaf in self.layer_caches]
        if kinds != [kind for kind, _ in state]:
            raise UserError("the cache state does not match the caches of this model")
        for leaf, (_, value) in zip(self.layer_caches, state, strict=True):
            leaf.state = _copy(value)
        self.length = length
        self.commit()
        self._check_offsets()

    def _drop(self, count: int) -> None:
        """Count `count` tokens less."""
        self.length -= count
        if self.recorded:
            self.recorded.trim(count)

    def _recurrent(self) -> list:
        return [leaf for leaf in self.layer_caches if _is_recurrent(leaf)]

    def _check_offsets(self) -> None:
        for leaf in self.layer_caches:
            offset = getattr(leaf, "offset", self.length)
            assert offset == self.length, f"{type(leaf).__name__} is at {offset}"
        assert self.recorded is None or self.recorded.end == self.length

    def _prepare_quantized(self) -> None:
        """Make the caches of the kinds that these have once they are quantized."""
        try:
            rotations = key_rotations(self.model)
            if not any(rotations):
                raise TypeError("it has no full-attention cache")
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"this model's keys and values cannot be quantized: {error}",
                hint="keep the model's dtype: kv_bits 16, or no kv_bits",
            ) from error
        plain = self._plain_caches()
        self._quantized_caches = [*map(_quantized, plain, self._layer_bits, rotations)]
        if not self._quantized_kv_start:
            # From the first token on: then chunks of a prompt do not change a result.
            self.caches = [*map(_like, self.caches, self._quantized_caches)]

    def _plain_caches(self) -> list:
        return [_with_window_cache(cache) for cache in make_cache(self.model)]

    def _quantize(self) -> None:
        rotations = key_rotations(self.model)
        self.caches = [*map(_quantized, self.caches, self._layer_bits, rotations)]

    def _of_kinds(self, index: int, cache: Any, kinds: list[str | None]) -> Any:
        """An empty cache of a layer, quantized if a stored state of it is.

        Args:
            kinds: class names of the stored states of this cache, by leaf.
        """
        if type(cache).__name__ != PLAIN or kinds != [QUANTIZED]:
            return cache
        return RotatedKVCache(key_rotations(self.model)[index], UNQUANTIZED)


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


def _like(empty, cache):
    """An empty cache, as quantized as another one of this layer."""
    if not hasattr(cache, "bits"):
        return empty
    return cache.empty_copy()


def _quantized(cache, bits: int, rotation: KeyRotation | None):
    if type(cache).__name__ != PLAIN or bits == UNQUANTIZED or rotation is None:
        return cache
    return rotated_cache(cache, rotation, bits)


def _with_window_cache(cache):
    """mlx-lm's cache, or a `WindowCache` in place of a RotatingKVCache."""
    if type(cache).__name__ == "RotatingKVCache" and not cache.keep:
        return WindowCache(cache.max_size)
    if hasattr(cache, "caches"):
        cache.caches = tuple(_with_window_cache(inner) for inner in cache.caches)
    return cache


def flatten_caches(caches: Sequence) -> list:
    """All caches in a flat list; nested cache lists are expanded."""
    return [
        leaf
        for cache in caches
        for leaf in (
            flatten_caches(cache.caches) if hasattr(cache, "caches") else [cache]
        )
    ]


def _is_recurrent(leaf) -> bool:
    return not hasattr(leaf, "update_and_fetch")


def _can_trim(leaf, count: int) -> bool:
    if not count:
        return True
    if isinstance(leaf, WindowCache):
        return leaf.can_trim(count)
    # mlx-lm's chunked cache drops its front once it starts at a position other than 0.
    return not _is_recurrent(leaf) and not getattr(leaf, "start_position", 0)


def _copy(state):
    """A copy of a cache state; needed because caches write arrays in place."""
    if isinstance(state, list | tuple):
        return type(state)(_copy(part) for part in state)
    return mx.array(state) if isinstance(state, mx.array) else state
