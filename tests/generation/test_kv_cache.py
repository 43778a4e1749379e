"""Every kind of cache: as no cache at all, and as if what was taken back never was."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.kv_cache import CacheState
from lmx.models.loader import build_model, make_cache
from tiny_families import FAMILIES, VOCABULARY, WINDOW, config

LONG = 4 * WINDOW + 3


def tiny(family, **changes):
    mx.random.seed(0)
    model = build_model(config(family) | changes)
    mx.eval(model.parameters())
    return model.eval()


def some_tokens(count, seed=0):
    draw = np.random.default_rng(seed)
    return mx.array(draw.integers(1, VOCABULARY, (1, count)))


def close(ours, theirs):
    scale = mx.abs(theirs).max().item()
    assert mx.abs(ours - theirs).max().item() <= 2e-5 * scale


@pytest.mark.parametrize("family", FAMILIES)
def test_cache_state_matches_no_cache_after_rollback(family):
    model, tokens = tiny(family), some_tokens(LONG)
    # Without any, mlx-lm's gemma3n does not share keys between layers.
    whole = model(tokens, cache=make_cache(model) if family == "gemma3n" else None)
    session = CacheState(model)
    close(session.forward(tokens[:, : WINDOW + 1]), whole[:, : WINDOW + 1])
    draw = np.random.default_rng(1)
    while session.length < LONG - 5:
        session.checkpoint()
        start, wrong = session.length, some_tokens(5, seed=session.length)
        right = int(draw.integers(0, 5))
        guess = mx.concatenate([tokens[:, start : start + right], wrong], axis=1)
        session.forward(guess[:, :2])
        session.forward(guess[:, 2:])
        session.rollback(guess.shape[1] - right)
        assert session.length == start + right
        step = tokens[:, session.length : session.length + 1]
        close(session.forward(step)[:, 0], whole[:, session.length - 1])


def test_rotating_cache_fails_after_rollback(monkeypatch):
    """The control: with mlx-lm's rotating cache the same is off, or refuses."""
    monkeypatch.setattr(
        "lmx.generation.kv_cache._with_window_cache", lambda cache: cache
    )
    model, tokens = tiny("gemma3"), some_tokens(LONG)
    session = CacheState(model)
    for place in range(2 * WINDOW):
        session.forward(tokens[:, place : place + 1])
    session.checkpoint()
    session.forward(some_tokens(4, seed=1))
    session.rollback(4)
    step = tokens[:, session.length : session.length + 1]
    off = session.forward(step)[:, 0] - model(tokens)[:, session.length - 1]
    assert mx.abs(off).max().item() > 1e-3


def test_window_cache_moves_buffer_without_loss(monkeypatch):
    monkeypatch.setattr("lmx.generation.kv_cache.BUFFER_STEP", 8)
    monkeypatch.setattr("lmx.generation.kv_cache.WINDOW_SLACK", 4)
    model, tokens = tiny("gemma3"), some_tokens(12 * WINDOW)
    whole, session = model(tokens), CacheState(model)
    for start in range(0, tokens.shape[1], 3):
        session.checkpoint()
        session.forward(some_tokens(4, seed=start))
        session.rollback(4)
        close(
            session.forward(tokens[:, start : start + 3]), whole[:, start : start + 3]
        )
    held = session.caches[0].keys.shape[2]
    assert held <= WINDOW + 4 + 4 + 2 * 8


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_cache_is_close_and_rolls_back(bits):
    model, tokens = tiny("llama", head_dim=32), some_tokens(40)
    whole, exact = (
        model(tokens),
        CacheState(model, kv_bits=bits, quantized_kv_start=100),
    )
    close(exact.forward(tokens), whole)
    session = CacheState(model, kv_bits=bits, quantized_kv_start=16)
    session.forward(tokens[:, :20])
    assert session.nbytes < exact.nbytes / 2
    near = session.forward(tokens[:, 20:30])
    assert 0 < mx.abs(near - whole[:, 20:30]).max().item() < 0.2 * mx.abs(whole).max()
    session.checkpoint()
    session.forward(some_tokens(3, seed=1))
    session.rollback(3)
    again = session.forward(tokens[:, 30:31])
    plain = CacheState(model, kv_bits=bits, quantized_kv_start=16)
    for part in (tokens[:, :20], tokens[:, 20:30]):
        plain.forward(part)
    close(again, plain.forward(tokens[:, 30:31]))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mamba"])
def test_cache_state_rejects_unsupported_quantization(family):
    with pytest.raises(UserError, match="cannot be quantized"):
        CacheState(tiny(family), kv_bits=8)


def test_rollback_beyond_checkpoint_is_an_error():
    session = CacheState(tiny("llama"))
    session.forward(some_tokens(4))
    session.checkpoint()
    session.forward(some_tokens(2))
    with pytest.raises(AssertionError, match="since the checkpoint"):
        session.rollback(3)
