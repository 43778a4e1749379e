"""Keys and values that are rotated before they are quantized.

A few channels of keys are far larger than the others, and far from zero. So the keys of
a layer are centred, scaled by channel, and rotated by a Hadamard matrix (QuaRot, arXiv
2404.00456), which spreads what is left over all channels. Queries are scaled inversely
and rotated alike. The mean needs no undo: it adds the same to all scores of a query,
which softmax ignores. Values are rotated, and so is the output of the attention. (A
mean of values would cost more than it saves: those of the first token are almost zero.)
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import mlx.core as mx

from ...models.loader import make_cache
from .layer_rows import AttentionRows, RowLengths

PLAIN, WINDOW = "KVCache", "RotatingKVCache"
GROUP_SIZES = (128, 64, 32)
CALIBRATION_TOKENS = 256
"""Random tokens that measure the channels of keys and queries."""
CLIPPED_RANGES = {2: 0.65, 3: 0.87}
"""The share of a group's range that is kept, with the least error for normal numbers.
With more bits it is all of the range."""
ROTATIONS = "_key_rotations"
MLX_LM_ATTENTION = "mlx_lm.models.base", "quantized_scaled_dot_product_attention"

Quantized = tuple[mx.array, mx.array, mx.array]
"""Codes, scales and biases."""


class RotatedKeys(tuple):
    """Codes, scales and biases of keys.

    Attributes:
        rotation: that of the keys, which their queries need too.
    """

    rotation: "KeyRotation"


@dataclass(frozen=True)
class KeyRotation:
    """The rotation of one layer's keys and queries.

    Attributes:
        mean: of the keys, [1, H, 1, D].
        scale: factors of the centred keys, [1, H, 1, D].
        group_size: of the quantized keys and values, for all bits.
    """

    mean: mx.array
    scale: mx.array
    group_size: int

    @cached_property
    def digest(self) -> str:
        """A hash of all numbers."""
        numbers = mx.concatenate([self.mean, self.scale]).astype(mx.float32)
        return hashlib.sha256(memoryview(numbers).tobytes()).hexdigest()[:8]

    def keys(self, keys: mx.array) -> mx.array:
        """Rotated keys [B, H, N, D]."""
        return rotated((keys - self.mean) * self.scale)

    def original_keys(self, keys: mx.array) -> mx.array:
        """Keys [B, H, N, D] of which these are the rotated ones."""
        return rotated(keys) / self.scale + self.mean

    def queries(self, queries: mx.array) -> mx.array:
        """Rotated queries [B, a multiple of H, N, D]."""
        batch, _, count, size = queries.shape
        heads = self.scale.shape[1]
        grouped = queries.reshape(batch, heads, -1, count, size)
        return rotated((grouped / self.scale[:, :, None]).reshape(queries.shape))


class RecordedChannels:
    """Stands in for a rotation, to record the keys and queries of a layer.

    Args:
        group_size: as for `KeyRotation`.
    """

    def __init__(self, group_size: int):
        self.group_size = group_size
        self._keys: list[mx.array] = []
        self._queries: list[mx.array] = []

    def keys(self, keys: mx.array) -> mx.array:
        """The keys as they are."""
        self._keys.append(keys)
        return keys

    def queries(self, queries: mx.array) -> mx.array:
        """The queries as they are. Several layers may share the keys."""
        self._queries.append(queries)
        return queries

    def rotation(self) -> KeyRotation:
        """The rotation with the least expected error of scores.

        The error of all rotated channels is alike: the sum of the keys' variances. It
        meets the sum of the queries' squares. The product is least if both have the
        same share in every channel.
        """
        (keys,) = self._keys
        # All attend to the first token, and its keys are like no other.
        numbers = keys[:, :, 1:].astype(mx.float32)
        mean = numbers.mean(axis=(0, 2), keepdims=True)
        variance = numbers.var(axis=(0, 2), keepdims=True)
        batch, heads, _, size = keys.shape
        squares = sum(
            queries.astype(mx.float32)
            .square()
            .reshape(batch, heads, -1, size)
            .mean(axis=(0, 2))
            for queries in self._queries
        ).reshape(mean.shape)

        def above_zero(x: mx.array) -> mx.array:
            return x + 1e-4 * x.mean(axis=-1, keepdims=True) + 1e-12

        scale = (above_zero(squares) / above_zero(variance)) ** 0.25
        mean, scale = mean.astype(keys.dtype), scale.astype(keys.dtype)
        return KeyRotation(mean, scale, self.group_size)


@dataclass(frozen=True)
class RotatedCodec:
    """Rotated and quantized keys and values: codes, scales and biases of each.

    Args:
        rotation: of the layer.
        bits: as for `mx.quantize`.
    """

    rotation: KeyRotation
    bits: int
    arrays = 6

    @property
    def group_size(self) -> int:
        """Numbers that share a scale and a bias."""
        return self.rotation.group_size

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays to store of new keys and values [B, H, N, D]."""
        spec = self.group_size, self.bits
        keys = quantized(self.rotation.keys(keys), *spec)
        return [*keys, *quantized(rotated(values), *spec)]

    def decode(self, parts: Sequence[mx.array]) -> tuple[RotatedKeys, Quantized]:
        """Keys and values for the attention."""
        keys = RotatedKeys(parts[:3])
        keys.rotation = self.rotation
        return keys, tuple(parts[3:])

    def keys(self, parts: Sequence[mx.array]) -> mx.array:
        """Keys [B, H, N, D] as before the rotation, with the error of the codes."""
        spec = {"group_size": self.group_size, "bits": self.bits}
        return self.rotation.original_keys(mx.dequantize(*parts[:3], **spec))

    def name(self, kind: str) -> str:
        """The name of a kind of cache with this codec."""
        return f"Rotated{kind} of {self.bits} bits, {self.rotation.digest}"


def key_rotations(model: Any) -> list[KeyRotation | None]:
    """The rotation of every layer with full or sliding attention; it is kept.

    Random tokens do for it, because the large channels are the same for all tokens. A
    rotation changes no result but by rounding, so it stays right for other weights.

    Returns:
        One for each cache of the model; None for another kind of cache.

    Raises:
        TypeError, ValueError, AttributeError: the model does not take such caches.
    """
    if ROTATIONS not in model.__dict__:
        import numpy as np

        caches = make_cache(model)
        _replace_attention()
        vocabulary = model(mx.zeros((1, 1), mx.int32), cache=caches).shape[-1]
        recorded: list[RecordedChannels | None] = [None] * len(caches)
        recording = make_cache(model)
        for i, cache in enumerate(caches):
            # Also for a window: the model hides what is outside of it.
            if type(cache).__name__ in (PLAIN, WINDOW) and not cache.empty():
                recorded[i] = RecordedChannels(_group_size(cache))
                codec = RotatedCodec(recorded[i], 8)
                recording[i] = AttentionRows(RowLengths(1), codec)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, vocabulary, (1, CALIBRATION_TOKENS))
        logits = model(mx.array(tokens), cache=recording)
        rotations = [channels and channels.rotation() for channels in recorded]
        mx.eval(logits[:, -1], [(r.mean, r.scale) for r in rotations if r])
        object.__setattr__(model, ROTATIONS, rotations)
    return model.__dict__[ROTATIONS]


def rotated(x: mx.array) -> mx.array:
    """x [..., D] times a Hadamard matrix, which is its own inverse.

    The matrix has blocks, as large as the largest power of two that divides D.
    """
    size = x.shape[-1]
    block = size & -size
    if block == size:
        return mx.hadamard_transform(x)
    return mx.hadamard_transform(x.reshape(*x.shape[:-1], -1, block)).reshape(x.shape)


def quantized(x: mx.array, group_size: int, bits: int) -> Quantized:
    """Codes, scales and biases of x, with clipped ranges for few bits."""
    share = CLIPPED_RANGES.get(bits)
    if share is None:
        return mx.quantize(x, group_size=group_size, bits=bits)
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    margin = (high - low) * ((1 - share) / 2)
    low, high = low + margin, high - margin
    # MLX moves a range to have an exact zero, which costs an end of the range. A range
    # that starts with zero stays as it is.
    shifted = (mx.clip(groups, low, high) - low).reshape(x.shape)
    codes, scales, biases = mx.quantize(shifted, group_size=group_size, bits=bits)
    return codes, scales, biases + low.squeeze(-1)


def _replace_attention() -> None:
    """Let the quantized attention of mlx-lm rotate queries and its output."""
    module, name = sys.modules[MLX_LM_ATTENTION[0]], MLX_LM_ATTENTION[1]
    original = getattr(module, name)
    if not hasattr(original, "__wrapped__"):
        setattr(module, name, wraps(original)(_with_rotation_of_keys(original)))


def _with_rotation_of_keys(attention: Callable) -> Callable:
    def call(queries, q_keys, q_values, *args, **options):
        if not isinstance(q_keys, RotatedKeys):
            return attention(queries, q_keys, q_values, *args, **options)
        queries = q_keys.rotation.queries(queries)
        return rotated(attention(queries, q_keys, q_values, *args, **options))

    return call


def _group_size(cache: Any) -> int:
    """The group size for the keys and values in a full-attention cache.

    Raises:
        ValueError: no group size of MLX divides the head dimensions.
    """
    widths = cache.keys.shape[-1], cache.values.shape[-1]
    for group_size in GROUP_SIZES:
        if not any(width % group_size for width in widths):
            return group_size
    raise ValueError(f"no group size divides the head dimension {widths[0]}")
