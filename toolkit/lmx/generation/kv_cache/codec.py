"""How a cache stores keys and values: as they are, or in another form."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class Codec(Protocol):
    """How keys and values are stored. Codecs have no state.

    Attributes:
        bits, group_size: as for `mx.quantize`; `bits` is None without quantization.
        arrays: how many are stored of keys and values.
    """

    bits: int | None
    group_size: int
    arrays: int

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays to store of new keys and values [B, H, N, D]."""
        ...

    def decode(self, parts: Sequence[mx.array]) -> tuple:
        """The keys and values that mlx-lm's attention takes, from such arrays."""
        ...

    def keys(self, parts: Sequence[mx.array]) -> mx.array:
        """The keys [B, H, N, D] in such arrays."""
        ...

    def name(self, kind: str) -> str:
        """The name of a kind of cache with this codec."""
        ...


class PlainCodec:
    """Keys and values in the dtype of the model."""

    bits = None
    group_size = 0
    arrays = 2

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays as they are."""
        return [keys, values]

    def decode(self, parts: Sequence[mx.array]) -> tuple:
        """Keys and values."""
        return parts[0], parts[1]

    def keys(self, parts: Sequence[mx.array]) -> mx.array:
        """The keys."""
        return parts[0]

    def name(self, kind: str) -> str:
        """The kind as it is."""
        return kind


PLAIN_CODEC = PlainCodec()
