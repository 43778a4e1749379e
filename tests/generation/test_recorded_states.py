"""Hidden states that are recorded with a cache, for drafters."""

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.prompt_cache import load_prompt_cache, save_prompt_cache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.models.hooks import forward_with_hidden_states, require_hidden_states
from tiny_requests import sharpened

LAYERS = (0, 1)
TOKENS = [5, 9, 2, 7, 1, 8, 3, 3, 6, 4, 2, 9]


def expected(model, tokens):
    return forward_with_hidden_states(model, mx.array([tokens]), LAYERS)[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "qwen3_next"])
def test_recorded_states_follow_rollback_of_every_cache_kind(family):
    model = sharpened(family)
    cache = CacheState(model)
    cache.record_hidden_states(LAYERS)
    cache.forward(mx.array([TOKENS[:5]]))
    cache.checkpoint()
    cache.forward(mx.array([[11, 12, 13]]))
    cache.rollback(3)
    cache.forward(mx.array([TOKENS[5:9]]))
    cache.checkpoint()
    cache.forward(mx.array([[*TOKENS[9:11], 13]]))
    cache.rollback(1)
    states = cache.recorded.since(0)
    assert states.shape[1] == cache.length == 11
    reference = expected(model, TOKENS[:11])
    assert mx.allclose(states, reference, atol=1e-4)
    assert mx.allclose(cache.recorded.since(7), reference[:, 7:], atol=1e-4)
    # The control: the states of other tokens differ.
    other = expected(model, [*TOKENS[:9], 11, 12])
    assert not mx.allclose(states, other, atol=1e-2)


def test_recorded_states_stay_in_prefix_cache_and_session(tmp_path):
    model = sharpened("llama")
    cache = CacheState(model)
    cache.record_hidden_states(LAYERS)
    cache.forward(mx.array([TOKENS]))
    reference = expected(model, TOKENS)
    prefixes = PrefixCache(1 << 20)
    prefixes.insert(TOKENS, cache)
    assert prefixes.nbytes > reference.nbytes
    restored, length = prefixes.fetch([*TOKENS[:8], 1, 1], lambda: CacheState(model))
    assert length == 8
    restored.record_hidden_states(LAYERS)
    assert mx.allclose(restored.recorded.since(0), reference[:, :8], atol=1e-5)
    # Other blocks: what was recorded is of no use, so recording starts anew.
    restored.record_hidden_states((1,))
    assert restored.recorded.start == 8

    def reloaded(prefixes):
        folder, new_cache = tmp_path / "session", lambda: CacheState(model)
        options = {"kinds": new_cache().kinds, "digest": "x"}
        save_prompt_cache(prefixes, folder, **options)
        again = PrefixCache(1 << 20)
        load_prompt_cache(again, folder, new_cache=new_cache, digest="x")
        loaded, _ = again.fetch([*TOKENS, 0], new_cache)
        loaded.record_hidden_states(LAYERS)
        return loaded.recorded

    assert mx.allclose(reloaded(prefixes).since(0), reference, atol=1e-5)
    # Without recording, a saved session has no hidden states, and that is fine.
    plain, prefixes = CacheState(model), PrefixCache(1 << 20)
    plain.forward(mx.array([TOKENS]))
    prefixes.insert(TOKENS, plain)
    recorded = reloaded(prefixes)
    assert (recorded.start, recorded.end) == (12, 12)
    # A later request with a drafter fills them in.
    prefixes.insert(TOKENS, cache)
    assert mx.allclose(reloaded(prefixes).since(0), reference, atol=1e-5)


def test_blocks_that_do_not_exist_are_refused():
    model = sharpened("llama")
    with pytest.raises(UserError, match="has blocks 0 to"):
        require_hidden_states(model, (0, 99), place="drafter")
    width = require_hidden_states(model, LAYERS, place="drafter")
    assert expected(model, TOKENS).shape[-1] == 2 * width
