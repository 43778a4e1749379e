"""Rotated and quantized keys and values: exact for what is stored, less error."""

import math

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.kv_cache import rotation as rotation_module
from lmx.generation.kv_cache.layer_rows import AttentionRows, RowLengths
from lmx.generation.kv_cache.rotation import (
    KeyRotation,
    RecordedChannels,
    RotatedCodec,
    key_rotations,
    quantized,
    rotated,
)
from lmx.generation.kv_cache.sequence import CacheState
from lmx.models.loader import build_model, make_cache
from tiny_families import VOCABULARY, changed, config

HEADS, GROUPS, LENGTH = 4, 2, 24


def normal(*shape, seed):
    return mx.array(np.random.default_rng(seed).normal(size=shape), mx.float32)


def wide(family="llama", **changes):
    mx.random.seed(0)
    model = build_model(changed(config(family), {"head_dim": 32} | changes))
    mx.eval(model.parameters())
    return model.eval()


def a_rotation(size, group_size=32):
    mean, scale = normal(2, 1, GROUPS, 1, size, seed=5)
    return KeyRotation(3 * mean, mx.exp(scale), group_size)


def quantized_cache(rotation, bits, rows=1):
    return AttentionRows(RowLengths(rows), RotatedCodec(rotation, bits))


def attention(*args, **options):
    key_rotations(wide())  # replaces the attention of mlx-lm
    from mlx_lm.models.base import scaled_dot_product_attention

    return scaled_dot_product_attention(*args, scale=0.3, **options)


def dequantized(parts, bits, group_size=32):
    return mx.dequantize(*parts, bits=bits, group_size=group_size)


@pytest.mark.parametrize(
    ("bits", "size"), [(2, 32), (3, 64), (4, 96), (5, 32), (6, 64), (8, 96)]
)
def test_attention_is_that_of_the_stored_keys_and_values(bits, size, monkeypatch):
    """The reference dequantizes, rotates back, and attends in float32."""
    rotation = a_rotation(size)
    cache = quantized_cache(rotation, bits, rows=2)
    queries = normal(2, HEADS, LENGTH, size, seed=0)
    keys, values = normal(2, 2, GROUPS, LENGTH, size, seed=1)
    keys = keys + rotation.mean
    cache.update_and_fetch(keys[:, :, :7], values[:, :, :7])
    stored = cache.update_and_fetch(keys[:, :, 7:], values[:, :, 7:])
    read = [
        rotation.original_keys(dequantized(stored[0], bits)),
        rotated(dequantized(stored[1], bits)),
    ]
    for last, mask in ((LENGTH, "causal"), (1, None)):
        asked = queries[:, :, -last:]
        options = {"cache": cache, "mask": mask}
        expected = mx.fast.scaled_dot_product_attention(
            asked, *read, scale=0.3, mask=mask
        )
        assert mx.abs(attention(asked, *stored, **options) - expected).max() < 2e-5
        plain = attention(asked, keys, values, cache=None, mask=mask)
        assert mx.abs(expected - plain).max() > 1e-3
        with monkeypatch.context() as patch:
            # Control: keys are rotated, and queries are not.
            patch.setattr(KeyRotation, "queries", lambda self, queries: queries)
            wrong = attention(asked, *stored, **options)
        assert mx.abs(wrong - expected).max() > 0.05


@pytest.mark.parametrize("size", [32, 96, 128, 160])
def test_rotations_are_orthogonal(size):
    x = normal(3, size, seed=2)
    assert mx.abs(rotated(rotated(x)) - x).max() < 1e-5
    assert mx.abs((rotated(x) ** 2).sum(-1) - (x**2).sum(-1)).max() < 1e-3
    # A large channel is spread over a block of the largest power of two.
    block = size & -size
    unit = rotated(mx.eye(size))
    assert mx.allclose(mx.abs(unit).max(), mx.array(block**-0.5))


@pytest.mark.parametrize(("bits", "most"), [(2, 0.78), (3, 0.88), (4, 1), (8, 1)])
def test_few_bits_clip_with_less_error_than_mlx(bits, most):
    x = normal(500, 64, seed=3)
    x[0] = 2.5
    spec = {"group_size": 64, "bits": bits}
    ours, theirs = quantized(x, **spec), mx.quantize(x, **spec)
    assert [part.shape for part in ours] == [part.shape for part in theirs]
    errors = [((mx.dequantize(*q, **spec) - x) ** 2).mean() for q in (ours, theirs)]
    assert errors[0] <= most * errors[1]
    assert mx.allclose(mx.dequantize(*ours, **spec)[0], x[0])


def test_rotation_undoes_planted_channels():
    """Large channels of keys cost 4 bits 20 times as much without a rotation."""
    size = 64
    scale = mx.ones(size)
    scale[mx.array([3, 35])] = 40.0
    queries, keys = normal(2, 1, 2, 300, size, seed=4)
    keys = (keys + 5) * scale
    queries = queries / scale
    channels = RecordedChannels(64)
    channels.keys(keys)
    channels.queries(queries)
    rotation, spec = channels.rotation(), {"group_size": 64, "bits": 4}

    def error(read):
        scores = queries @ (read - keys).swapaxes(-1, -2)
        return scores.var(axis=-1).mean().item()

    plain = mx.dequantize(*mx.quantize(keys, **spec), **spec)
    ours = mx.dequantize(*quantized(rotation.keys(keys), **spec), **spec)
    assert error(rotation.original_keys(ours)) < error(plain) / 20


def test_rotations_are_measured_once_for_a_model(monkeypatch):
    model = wide()
    first = key_rotations(model)
    monkeypatch.setattr(rotation_module, "RecordedChannels", None)
    assert key_rotations(model) is first
    caches = CacheState(model, kv_bits=4).caches
    assert [cache.codec.rotation for cache in caches] == first
    assert not any("rotation" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("gemma3n", "RotatedWindowCache"),
        ("qwen3_next", "ArraysCache"),
        ("gemma3", "RotatedWindowCache"),
    ],
)
def test_families_with_other_layers(family, other):
    """8 bits are close to no bits with shared keys, states and windows."""
    model = wide(family)
    tokens = mx.array(np.random.default_rng(0).integers(1, VOCABULARY, (1, LENGTH)))
    expected = model(tokens, cache=make_cache(model))
    cache = CacheState(model, kv_bits=8)
    kinds = {kind.partition(" ")[0] for kind in cache.kinds}
    assert kinds == {"RotatedKVCache", other}
    error = mx.abs(cache.forward(tokens) - expected).max().item()
    assert 0 < error < 0.03 * mx.abs(expected).max().item()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_window_has_the_entries_of_a_quantized_cache(bits):
    """Of the last positions, also when its ring has been written over."""
    window, codec = 5, RotatedCodec(a_rotation(32), bits)
    cache, whole = (CacheOfOne(codec, size) for size in (window, math.inf))
    for step in range(200):
        count = 1 + step % 2 + 90 * (step % 41 == 40)
        keys, values = normal(2, 1, GROUPS, count, 32, seed=step)
        for each in (cache, whole):
            each.add(keys, values)
        kept = max(0, whole.length - window + 1)
        for ours, theirs in zip(cache.from_(kept), whole.from_(kept), strict=True):
            assert mx.array_equal(ours, theirs)
        if step % 7 == 6:
            assert cache.layer.can_trim(2)
            cache.trim(2)
            whole.trim(2)
    assert cache.layer.first > 0
    assert cache.layer.nbytes < whole.layer.nbytes


class CacheOfOne:
    """A layer with one row, and its length."""

    def __init__(self, codec, size):
        self.lengths = RowLengths(1)
        self.layer = AttentionRows(self.lengths, codec, size)

    @property
    def length(self):
        return self.lengths.values[0]

    def add(self, keys, values):
        self.layer.update_and_fetch(keys, values)
        self.trim(-keys.shape[2])

    def trim(self, count):
        self.lengths.set([self.length - count])

    def from_(self, start):
        return self.layer.entries(start, self.length)


def test_caches_of_another_rotation_are_of_another_kind():
    names = {quantized_cache(a_rotation(size), 4).name for size in (32, 32, 64)}
    assert len(names) == 2
    assert quantized_cache(a_rotation(32), 8).name not in names


@pytest.mark.parametrize("window", [None, 9, 100])
def test_masks_are_those_of_mlx_lm(window):
    cache, theirs = quantized_cache(a_rotation(32), 4), make_cache(wide())[0]
    keys = normal(1, GROUPS, 12, 32, seed=6)
    for layer in (cache, theirs):
        layer.update_and_fetch(keys, keys)
    for length in (1, 5):
        options = {"window_size": window, "return_array": True}
        ours = cache.make_mask(length, **options)
        other = theirs.make_mask(length, **options)
        if ours is None or other is None:
            assert length == 1
            assert all(mask is None or mask.all() for mask in (ours, other))
        else:
            assert mx.array_equal(ours, other)
