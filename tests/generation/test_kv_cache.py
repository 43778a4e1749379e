"""Every kind of cache: equal to no cache, also after rollback."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.kv_cache.layer_rows import WINDOW_SLACK
from lmx.generation.kv_cache.sequence import CacheState
from lmx.models.loader import build_model
from tiny_families import FAMILIES, VOCABULARY, WINDOW, config

LONG = 4 * WINDOW + 3


def tiny(family, **changes):
    mx.random.seed(0)
    model = build_model(config(family) | changes)
    mx.eval(model.parameters())
    return model.eval()


def random_tokens(count, seed=0):
    rng = np.random.default_rng(seed)
    return mx.array(rng.integers(1, VOCABULARY, (1, count)))


def assert_close(ours, theirs):
    scale = mx.abs(theirs).max().item()
    assert mx.abs(ours - theirs).max().item() <= 2e-5 * scale


# One family of every kind of cache.
SHOWN = [
    *("llama", "gemma3", "gemma3n", "gemma4", "deepseek_v3", "qwen3_next", "mamba2"),
    *("falcon_h1", "gpt_oss", "llama4_text", "recurrent_gemma", "deepseek_v32"),
]


@pytest.mark.parametrize(
    "family",
    [f if f in SHOWN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_cache_state_matches_no_cache_after_rollback(family):
    model, tokens = tiny(family), random_tokens(LONG)
    # As training and perplexity compute it.
    whole = model.train()(tokens)
    model.eval()
    cache = CacheState(model)
    assert_close(cache.forward(tokens[:, : WINDOW + 1]), whole[:, : WINDOW + 1])
    rng = np.random.default_rng(1)
    while cache.length < LONG - 5:
        cache.checkpoint()
        start, wrong = cache.length, random_tokens(5, seed=cache.length)
        accepted = int(rng.integers(0, 5))
        draft = mx.concatenate([tokens[:, start : start + accepted], wrong], axis=1)
        cache.forward(draft[:, :2])
        cache.forward(draft[:, 2:])
        cache.rollback(draft.shape[1] - accepted)
        assert cache.length == start + accepted
        step = tokens[:, cache.length : cache.length + 1]
        assert_close(cache.forward(step)[:, 0], whole[:, cache.length - 1])


def test_rotating_cache_fails_after_rollback(monkeypatch):
    """Control: with mlx-lm's rotating cache the logits after rollback are wrong."""
    monkeypatch.setattr("lmx.generation.kv_cache.sequence.WINDOW", None)
    model, tokens = tiny("gemma3"), random_tokens(LONG)
    cache = CacheState(model)
    for position in range(2 * WINDOW):
        cache.forward(tokens[:, position : position + 1])
    cache.checkpoint()
    cache.forward(random_tokens(4, seed=1))
    cache.rollback(4)
    step = tokens[:, cache.length : cache.length + 1]
    error = cache.forward(step)[:, 0] - model(tokens)[:, cache.length - 1]
    assert mx.abs(error).max().item() > 1e-3


def test_a_ring_is_written_over_without_loss():
    """By few positions, and by more at once than it holds."""
    model, tokens = tiny("gemma3"), random_tokens(7 * (WINDOW + WINDOW_SLACK))
    whole, cache, start = model(tokens), CacheState(model), 0
    for number in range(60):
        cache.checkpoint()
        cache.forward(random_tokens(4, seed=start))
        cache.rollback(4)
        end = start + (WINDOW_SLACK + WINDOW + 9 if number % 20 == 7 else 3)
        assert_close(cache.forward(tokens[:, start:end]), whole[:, start:end])
        start = end
    assert start > 4 * (WINDOW + WINDOW_SLACK)
    ring = cache.caches[0]
    assert ring.keys.shape[2] == WINDOW + WINDOW_SLACK
    assert ring.can_trim(WINDOW_SLACK)
    assert not ring.can_trim(WINDOW_SLACK + 2)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_quantized_cache_is_close_and_rolls_back(bits):
    model, tokens = tiny("llama", head_dim=32), random_tokens(40)
    whole, exact = model(tokens), CacheState(model)
    exact.forward(tokens)
    cache = CacheState(model, kv_bits=bits)
    cache.forward(tokens[:, :20])
    assert cache.nbytes < exact.nbytes / 2
    quantized = cache.forward(tokens[:, 20:30])
    assert (
        0 < mx.abs(quantized - whole[:, 20:30]).max().item() < 0.2 * mx.abs(whole).max()
    )
    cache.checkpoint()
    cache.forward(random_tokens(3, seed=1))
    cache.rollback(3)
    again = cache.forward(tokens[:, 30:31])
    plain = CacheState(model, kv_bits=bits)
    for part in (tokens[:, :20], tokens[:, 20:30]):
        plain.forward(part)
    assert_close(again, plain.forward(tokens[:, 30:31]))


def test_every_layer_has_its_own_bits_after_rollback_and_restore():
    model, tokens = tiny("llama", head_dim=32, num_hidden_layers=3), random_tokens(24)
    cache = CacheState(model, kv_bits=[8, 16, 4])
    cache.forward(tokens[:, :10])
    cache.forward(tokens[:, 10:20])
    bits = [getattr(leaf, "bits", None) for leaf in cache.caches]
    assert bits == [8, None, 4]
    cache.checkpoint()
    cache.forward(random_tokens(3, seed=1))
    cache.rollback(3)
    restored = CacheState(model, kv_bits=[8, 16, 4])
    restored.restore(cache.positions(0, 20), cache.snapshot(), 20)
    assert [getattr(leaf, "bits", None) for leaf in restored.caches] == bits
    plain = CacheState(model, kv_bits=[8, 16, 4])
    for part in (tokens[:, :10], tokens[:, 10:20]):
        plain.forward(part)
    expected = plain.forward(tokens[:, 20:])
    assert_close(cache.forward(tokens[:, 20:]), expected)
    assert_close(restored.forward(tokens[:, 20:]), expected)


def test_bits_need_one_entry_for_each_layer():
    model = tiny("llama", head_dim=32, num_hidden_layers=3)
    with pytest.raises(UserError, match="for 2 layers, and the model has 3"):
        CacheState(model, kv_bits=[8, 4])
    assert CacheState(model, kv_bits=[16, 16, 16]).nbytes == 0


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mamba"])
def test_cache_state_rejects_unsupported_quantization(family):
    with pytest.raises(UserError, match="cannot be quantized"):
        CacheState(tiny(family), kv_bits=8)


def test_rollback_beyond_checkpoint_is_an_error():
    cache = CacheState(tiny("llama"))
    cache.forward(random_tokens(4))
    cache.checkpoint()
    cache.forward(random_tokens(2))
    with pytest.raises(AssertionError, match="since the checkpoint"):
        cache.rollback(3)
