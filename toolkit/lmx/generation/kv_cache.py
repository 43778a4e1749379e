"""One sequence and its caches: tokens go in, and the last ones can be taken back."""

from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..models.loader import make_cache
from .window_cache import WindowCache

PLAIN, QUANTIZED = "KVCache", "QuantizedKVCache"
GROUPS = (128, 64, 32)


class CacheState:
    """What a model has read so far, under one contract for every kind of cache.

    `length` is the number of tokens read, and every layer's cache agrees with it.
    Attention takes tokens back by forgetting them. A recurrent state cannot: it is kept
    at a checkpoint, and what was read since and stays is read again.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        kv_bits: 4 or 8 = keep keys and values quantized; None = as they are. Windows
            keep theirs: they are small already.
        quantized_kv_start: tokens from which on they are quantized.

    Raises:
        UserError: keys and values of this model cannot be quantized.
    """

    def __init__(
        self, model: Any, *, kv_bits: int | None = None, quantized_kv_start: int = 0
    ):
        self.model = model
        self.caches = [_own(cache) for cache in make_cache(model)]
        self.length = 0
        self._kv_bits, self._kv_start = kv_bits, quantized_kv_start
        if kv_bits:
            self._try_quantized()
        # Recurrent states at the checkpoint, and what was read since; None = there is
        # no checkpoint, and what is read stays.
        self._states: list[tuple] = []
        self._since: list[mx.array] | None = None

    @property
    def layer_caches(self) -> list:
        """The caches, those in lists of caches one by one."""
        return [leaf for cache in self.caches for leaf in _leaves(cache)]

    @property
    def is_recurrent(self) -> bool:
        """Whether some layer keeps a state that sums up what it has read."""
        return any(map(_is_recurrent, self.layer_caches))

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(leaf.nbytes for leaf in self.layer_caches if not leaf.empty())

    def forward(self, tokens: mx.array) -> mx.array:
        """Read tokens [B, L]; their logits [B, L, V], not yet computed."""
        logits = self.model(tokens, cache=self.caches)
        self.length += tokens.shape[1]
        if self._since is not None:
            self._since.append(tokens)
        if self._kv_bits and self.length > self._kv_start:
            self._quantize()
        self._check()
        return logits

    def checkpoint(self) -> None:
        """From here on what is read can be taken back."""
        self._states = [_copied(leaf.state) for leaf in self._recurrent()]
        self._since = []

    def commit(self) -> None:
        """What is read stays, until the next checkpoint; nothing is kept to undo it."""
        self._states, self._since = [], None

    def rollback(self, count: int, *, sequential_verify: bool = False) -> None:
        """Take back the last tokens, all of them read since the checkpoint.

        Args:
            sequential_verify: what must be read again is read in passes of one token.
        """
        since = sum(tokens.shape[1] for tokens in self._since or [])
        assert 0 <= count <= since, f"{count} tokens back, {since} since the checkpoint"
        if not count:
            return
        stay = mx.concatenate(self._since, axis=1)[:, : since - count]
        recurrent = self._recurrent()
        # What is read again must find all layers at the same place.
        back = since if recurrent else count
        for leaf in self.layer_caches:
            if not _is_recurrent(leaf):
                assert leaf.trim(back) == back
        for leaf, state in zip(recurrent, self._states, strict=True):
            leaf.state = _copied(state)
        self.length -= back
        self._since = [stay] if not recurrent and stay.size else []
        if recurrent and stay.size:
            width = 1 if sequential_verify else stay.shape[1]
            for start in range(0, stay.shape[1], width):
                self.forward(stay[:, start : start + width])
        self._check()

    def trim(self, count: int) -> bool:
        """Take back the last tokens, however long ago they were read.

        Returns:
            False, with nothing done, where a cache does not hold what that takes.
        """
        if not all(_can_trim(leaf, count) for leaf in self.layer_caches):
            return False
        for leaf in self.layer_caches if count else []:
            leaf.trim(count)
        self.length -= count
        self.commit()
        self._check()
        return True

    def evaluate(self) -> None:
        """Compute the caches, and nothing else: a prompt's logits cost nothing."""
        mx.eval([cache.state for cache in self.layer_caches])

    @property
    def state(self) -> list[tuple[str, tuple]]:
        """Kind and state of every cache; a copy, which later steps do not change."""
        return [
            (type(leaf).__name__, _copied(leaf.state)) for leaf in self.layer_caches
        ]

    def restore(self, state: list[tuple[str, tuple]], length: int) -> None:
        """Be where a session of the same model was that had this state and length.

        Raises:
            UserError: the state has caches of other kinds.
        """
        if any(kind == QUANTIZED for kind, _ in state):
            self.caches = [_emptied(cache) for cache in self.caches]
        kinds = [type(leaf).__name__ for leaf in self.layer_caches]
        if kinds != [kind for kind, _ in state]:
            raise UserError("this state is of other kinds of cache than the model's")
        for leaf, (_, value) in zip(self.layer_caches, state, strict=True):
            leaf.state = _copied(value)
        self.length = length
        self.commit()
        self._check()

    def _recurrent(self) -> list:
        return [leaf for leaf in self.layer_caches if _is_recurrent(leaf)]

    def _check(self) -> None:
        for leaf in self.layer_caches:
            offset = getattr(leaf, "offset", self.length)
            assert offset == self.length, f"{type(leaf).__name__} is at {offset}"

    def _try_quantized(self) -> None:
        """That the model can read on with keys and values that are quantized."""
        caches, tokens = self.caches, mx.zeros((1, 2), mx.int32)
        try:
            self.model(tokens, cache=caches)
            self._quantize()
            if self.caches == caches:
                raise TypeError("it has none of full attention")
            mx.eval(self.model(tokens, cache=self.caches))
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"this model's keys and values cannot be quantized: {error}",
                hint="leave the cache as it is",
            ) from error
        self.caches = [_own(cache) for cache in make_cache(self.model)]

    def _quantize(self) -> None:
        self.caches = [self._quantized(cache) for cache in self.caches]

    def _quantized(self, cache):
        if type(cache).__name__ != PLAIN:
            return cache
        width = cache.keys.shape[-1], cache.values.shape[-1]
        group = next((g for g in GROUPS if not any(w % g for w in width)), None)
        if group is None:
            raise ValueError(f"no group of 32 fits their width, {width[0]}")
        return cache.to_quantized(group_size=group, bits=self._kv_bits)


def _own(cache):
    """mlx-lm's cache, or ours where its own cannot take tokens back."""
    if type(cache).__name__ == "RotatingKVCache" and not cache.keep:
        return WindowCache(cache.max_size)
    if hasattr(cache, "caches"):
        cache.caches = tuple(_own(inner) for inner in cache.caches)
    return cache


def _emptied(cache):
    """A cache of plain attention, empty, of the quantized kind; another as it is."""
    return cache.to_quantized() if type(cache).__name__ == PLAIN else cache


def _leaves(cache) -> list:
    inner = getattr(cache, "caches", None)
    return [cache] if inner is None else [leaf for c in inner for leaf in _leaves(c)]


def _is_recurrent(leaf) -> bool:
    return not hasattr(leaf, "update_and_fetch")


def _can_trim(leaf, count: int) -> bool:
    if not count:
        return True
    if isinstance(leaf, WindowCache):
        return leaf.can_trim(count)
    # Of mlx-lm's chunked cache the front is gone once it has begun anywhere but at 0.
    return not _is_recurrent(leaf) and not getattr(leaf, "start_position", 0)


def _copied(state):
    """A state that later steps cannot change; arrays are written to in place."""
    if isinstance(state, list | tuple):
        return type(state)(_copied(part) for part in state)
    return mx.array(state) if isinstance(state, mx.array) else state
