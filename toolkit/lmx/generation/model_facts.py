"""What the scheduler has to know of a model."""

from functools import cached_property
from math import inf
from typing import Any

import mlx.core as mx

from ..models.lora.multi_lora import BASE, MultiLoRA, multi_lora
from .kv_cache.batch import is_batchable, max_padded_width, takes_padding
from .kv_cache.eviction import KVLimit
from .kv_cache.layer_rows import WINDOW_SLACK
from .kv_cache.sequence import CacheState, KVBits


class ModelFacts:
    """Facts of a model, each from a pass of it when it is first asked for.

    Args:
        model: maps tokens [B, L] and a list of caches to logits [B, L, V].
        kv_bits, kv_limit: as for `CacheState`.
    """

    def __init__(
        self, model: Any, kv_bits: KVBits = None, kv_limit: KVLimit | None = None
    ):
        self.model, self._kv_bits, self.kv_limit = model, kv_bits, kv_limit

    @property
    def selects(self) -> bool:
        """Whether keys and values are selected where a prompt ends."""
        return bool(self.kv_limit and self.kv_limit.selects)

    @property
    def adapters(self) -> MultiLoRA:
        """LoRA adapters that requests can name."""
        return multi_lora(self.model)

    def new_cache(self, adapter: int = BASE) -> CacheState:
        """An empty cache of one sequence, processed with an adapter."""
        cache = self._empty_cache.empty_copy()
        cache.adapter = adapter
        return cache

    def takes_batches(self, *, padded: bool) -> bool:
        """Whether rows are computed as alone, also beside rows with padding."""
        return is_batchable(self.model) and (not padded or takes_padding(self.model))

    @cached_property
    def max_padded_width(self) -> int:
        """The most tokens of a row in a pass with padding."""
        return max_padded_width(self._empty_cache)

    @cached_property
    def capacities(self) -> list[dict[float, float]]:
        """`CacheState.bytes_by_capacity` of every process with other layers."""
        return [self.new_cache().bytes_by_capacity()]

    def cache_bytes(self, length: int, *, in_prompt: bool = False) -> float:
        """Bytes of the keys and values of so many tokens of a request.

        Args:
            in_prompt: they are tokens of its prompt, which has not ended.
        """
        bound: float = inf
        if self.selects and not in_prompt:
            bound = self.kv_limit.max_size + WINDOW_SLACK
        return max(
            sum(
                per_token * min(length, bound if size == inf else size)
                for size, per_token in each.items()
            )
            for each in self.capacities
        )

    @cached_property
    def vocab_size(self) -> int:
        """The number of logits."""
        # Only the shape is used, so nothing is computed.
        return self.model(mx.zeros((1, 1), mx.int32)).shape[-1]

    @cached_property
    def _empty_cache(self) -> CacheState:
        # With KV bits, the keys of the model are measured: once, not for every request.
        options = {"kv_bits": self._kv_bits, "kv_limit": self.kv_limit}
        return CacheState(self.model, **options)
