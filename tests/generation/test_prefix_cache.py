"""Prompt caches from a file or an earlier request, compared with new caches."""

import json
import os

import mlx.core as mx
import pytest
from lmx.errors import UserError
from lmx.generation.generator import Generator
from lmx.generation.kv_cache import prefix as prefix_cache
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from test_kv_cache import LONG, assert_close, random_tokens, tiny
from tiny_generators import MODELS, byte_tokenizer
from tiny_generators import tiny as random_model

FAMILIES = ["llama", "gemma3", "qwen3_next", "deepseek_v3", "falcon_h1", "llama4_text"]


def read_in_parts(cache, tokens, part=7):
    for start in range(0, tokens.shape[1], part):
        logits = cache.forward(tokens[:, start : start + part])
    return logits


def ids(tokens):
    return tokens[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_prompt_cache_continues_identically(family, tmp_path):
    model, tokens = tiny(family), random_tokens(LONG)
    cache = CacheState(model)
    read_in_parts(cache, tokens)
    prefix_cache.save_prompt_cache(
        cache, tmp_path / "chat", digest="d", tokens=ids(tokens)
    )
    loaded = CacheState(model)
    found = prefix_cache.load_prompt_cache(loaded, tmp_path / "chat", digest="d")
    assert found.tokens == ids(tokens)
    for token in ids(random_tokens(12, seed=1)):
        one = mx.array([[token]])
        assert mx.array_equal(loaded.forward(one), cache.forward(one))


def test_saved_prompt_cache_keeps_quantized_keys(tmp_path):
    model, tokens = tiny("llama", head_dim=32), random_tokens(LONG)
    cache = CacheState(model, kv_bits=8)
    read_in_parts(cache, tokens)
    prefix_cache.save_prompt_cache(
        cache, tmp_path / "chat", digest="d", tokens=ids(tokens)
    )
    loaded = CacheState(model, kv_bits=8)
    prefix_cache.load_prompt_cache(loaded, tmp_path / "chat", digest="d")
    one = random_tokens(1, seed=1)
    assert mx.array_equal(loaded.forward(one), cache.forward(one))


@pytest.fixture
def saved(tmp_path):
    """A model, and the folder of a prompt cache of it."""
    model, tokens = tiny("llama"), random_tokens(9)
    cache, folder = CacheState(model), tmp_path / "chat"
    cache.forward(tokens)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    prefix_cache.save_prompt_cache(
        cache, folder, digest="d", tokens=ids(tokens), messages=chat
    )
    return model, folder


def load(saved, *, model=None, digest="d"):
    cache = CacheState(model or saved[0])
    return prefix_cache.load_prompt_cache(cache, saved[1], digest=digest)


def edit(saved, change, *, signed=False):
    """Change what the metadata says, with or without its hash."""
    file = saved[1] / prefix_cache.METADATA_FILE
    content = json.loads(file.read_text())
    change(content["prompt"])
    if signed:
        prompt = prefix_cache.SavedPrompt.model_validate(content["prompt"])
        content["sha256"] = prompt.sha256
    file.write_text(json.dumps(content))


def test_load_prompt_cache_returns_what_was_saved(saved):
    loaded = load(saved)
    assert loaded.tokens == ids(random_tokens(9))
    assert [m["content"] for m in loaded.messages] == ["hi", "ho"]


def test_load_prompt_cache_rejects_other_models(saved, tmp_path):
    with pytest.raises(UserError, match="another model"):
        load(saved, digest="e")
    with pytest.raises(UserError, match="not a saved prompt cache"):
        load((saved[0], tmp_path / "nothing"))
    with pytest.raises(UserError, match="does not match the caches"):
        load(saved, model=tiny("gemma3"))
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(saved, model=tiny("llama", head_dim=32))


CHANGES = {
    "a token less": lambda prompt: prompt["tokens"].pop(0),
    "tokens swapped": lambda prompt: prompt["tokens"].sort(),
    "another token": lambda prompt: prompt["tokens"].__setitem__(0, 99),
    "another message": lambda prompt: prompt["messages"].pop(),
    "another model": lambda prompt: prompt.update(digest="e"),
    "another kind": lambda prompt: prompt["kinds"].__setitem__(0, "RotatingKVCache"),
}
MALFORMED = {
    "no messages": lambda prompt: prompt.pop("messages"),
    "no tokens": lambda prompt: prompt.pop("tokens"),
    "a message without text": lambda prompt: prompt["messages"][0].pop("content"),
    "a text for a token": lambda prompt: prompt["tokens"].append("x"),
    "a negative token": lambda prompt: prompt["tokens"].append(-1),
    "an unknown key": lambda prompt: prompt.update(more=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_prompt_cache_is_noticed(saved, change):
    edit(saved, CHANGES[change])
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(saved)


@pytest.mark.parametrize("change", MALFORMED)
def test_malformed_metadata_is_refused(saved, change):
    edit(saved, MALFORMED[change])
    with pytest.raises(UserError, match="not a saved prompt cache"):
        load(saved)


@pytest.mark.parametrize("change", ["a token less", "another kind"])
def test_metadata_that_does_not_fit_the_arrays_is_refused(saved, change):
    edit(saved, CHANGES[change], signed=True)
    with pytest.raises(UserError, match=r"is damaged|does not match the caches"):
        load(saved)


def test_damaged_files_of_a_prompt_cache_are_refused(saved):
    arrays, metadata = (
        saved[1] / name
        for name in (prefix_cache.ARRAYS_FILE, prefix_cache.METADATA_FILE)
    )
    content = bytearray(arrays.read_bytes())
    content[-1] ^= 1
    arrays.write_bytes(content)
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(saved)
    metadata.write_text(metadata.read_text()[:-20])
    with pytest.raises(UserError, match="not JSON"):
        load(saved)
    for file in (arrays, metadata):  # a pipe would be read for ever
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(UserError):
            load(saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_cache_matches_fresh_cache(family):
    model, prefixes = tiny(family), PrefixCache(1 << 30)
    first = random_tokens(LONG)
    cache = CacheState(model)
    read_in_parts(cache, first)
    prefixes.insert(ids(first), cache)
    # The stored state is a copy: the cache itself may continue.
    cache.forward(random_tokens(3, seed=9))
    for common in (LONG, LONG - 1, LONG - 4, 5, 0):
        second = ids(first)[:common] + ids(random_tokens(6, seed=common + 1))
        resumed, length = prefixes.fetch(second, lambda: CacheState(model))
        assert length == resumed.length <= common
        if common == LONG:
            assert length == LONG
        suffix = mx.array([second[length:]])
        expected = read_in_parts(CacheState(model), mx.array([second]))
        assert_close(resumed.forward(suffix)[:, -1], expected[:, -1])


def test_prefix_cache_reuses_common_prefix():
    tokens = ids(random_tokens(LONG))
    for family, expected in (("llama", 20), ("gemma3", 20), ("falcon_h1", 0)):
        model, prefixes = tiny(family), PrefixCache(1 << 30)
        cache = CacheState(model)
        cache.forward(mx.array([tokens]))
        prefixes.insert(tokens, cache)
        prompt = [*tokens[:20], 1, 2, 3]
        _, length = prefixes.fetch(prompt, lambda model=model: CacheState(model))
        assert length == expected, family


def test_prefix_cache_leaves_last_token():
    model, tokens = tiny("llama"), random_tokens(9)
    cache, prefixes = CacheState(model), PrefixCache(1 << 30)
    cache.forward(tokens)
    prefixes.insert(ids(tokens), cache)
    assert prefixes.fetch(ids(tokens), lambda: CacheState(model))[1] == 8


def ends_by_length(generator, prompt):
    return generator.generate(prompt, max_tokens=9, stop_tokens=()).tokens


def ends_by_token(generator, prompt):
    ninth = ends_by_length(Generator(generator.model, generator.tokenizer), prompt)[8]
    return generator.generate(prompt, max_tokens=20, stop_tokens=(ninth,)).tokens


def ends_by_text(generator, prompt):
    plain = Generator(generator.model, generator.tokenizer)
    text = plain.generate(prompt, max_tokens=9, stop_tokens=()).text
    stop = {"stop": [text[4:6]], "stop_tokens": ()}
    result = generator.generate(prompt, max_tokens=20, **stop)
    assert result.finish_reason == "stop"
    return result.tokens


def abandoned(generator, prompt):
    stream = generator.stream(prompt, max_tokens=20, stop_tokens=())
    tokens = [next(stream).token for _ in range(4)]
    stream.close()
    return tokens


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "first_turn", [ends_by_length, ends_by_token, ends_by_text, abandoned]
)
def test_prefix_cache_does_not_change_next_turn(model, first_turn):
    plain = Generator(random_model(model), byte_tokenizer(), prefill_step_size=8)
    prefixes = PrefixCache(1 << 30)
    reusing = Generator(
        plain.model, plain.tokenizer, prefix_cache=prefixes, prefill_step_size=8
    )
    for seed in range(3):
        prompt = [*range(seed, 60 + seed, 2)]
        completion = first_turn(reusing, prompt)
        cache, length = prefixes.fetch(
            [*prompt, *completion, 0], lambda: CacheState(plain.model)
        )
        assert length == cache.length >= len(prompt) + len(completion) - 1
        second = [*prompt, *completion, *range(5)]
        options = {"max_tokens": 20, "stop_tokens": ()}
        loaded = reusing.generate(second, **options)
        assert loaded.tokens == plain.generate(second, **options).tokens


def test_prefix_cache_evicts_least_recently_used():
    model = tiny("llama")

    def store(prefixes, seed):
        tokens = random_tokens(9, seed=seed)
        cache = CacheState(model)
        cache.forward(tokens)
        prefixes.insert(ids(tokens), cache)
        return ids(tokens), cache.nbytes

    prefixes = PrefixCache(1 << 30)
    _, size = store(prefixes, 0)
    prefixes = PrefixCache(2 * size)
    one, two = store(prefixes, 1)[0], store(prefixes, 2)[0]
    prefixes.fetch([*one, 1], lambda: CacheState(model))
    three = store(prefixes, 3)[0]
    assert prefixes.nbytes <= 2 * size
    lengths = [
        prefixes.fetch([*t, 1], lambda: CacheState(model))[1] for t in (one, two, three)
    ]
    assert lengths == [9, 0, 9]
    small = PrefixCache(size - 1)
    store(small, 4)
    assert not small.nbytes
