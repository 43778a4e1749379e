"""Prompt caches from a file or an earlier request, compared with new caches."""

import json
import os
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.engine import Engine
from lmx.generation.generator import Generator
from lmx.generation.kv_cache import prefix, prompt_cache
from lmx.generation.kv_cache.batch import is_batchable
from lmx.generation.kv_cache.prefix import PrefixCache, PrefixNode
from lmx.generation.kv_cache.prompt_cache import load_prompt_cache, save_prompt_cache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sequence import GenerationRequest
from test_kv_cache import LONG, assert_close, random_tokens, tiny
from tiny_generators import byte_tokenizer
from tiny_generators import tiny as random_model
from tiny_requests import alone, run, sharpened

pytestmark = pytest.mark.fused

FAMILIES = ["llama", "gemma3", "qwen3_next", "deepseek_v3", "falcon_h1", "llama4_text"]


def read_in_parts(cache, tokens, part=7):
    for start in range(0, tokens.shape[1], part):
        logits = cache.forward(tokens[:, start : start + part])
    return logits


def ids(tokens):
    return tokens[0].tolist()


def save(cache, tokens, folder, messages=()):
    prefixes = PrefixCache(1 << 30)
    prefixes.insert(ids(tokens), cache)
    save_prompt_cache(
        prefixes, folder, kinds=cache.kinds, digest="d", messages=messages
    )


def load(model, folder, tokens=(), *, digest="d", **options):
    """The saved cache of these tokens, and what was saved with it."""
    prefixes = PrefixCache(1 << 30)
    new_cache = partial(CacheState, model, **options)
    saved = load_prompt_cache(prefixes, folder, new_cache=new_cache, digest=digest)
    return prefixes.fetch([*tokens, 0], new_cache)[0], saved


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # mamba has snapshots only.
        *((family, {}) for family in (*FAMILIES[1:], "mamba")),
        ("llama", {"kv_bits": [8, 16]}),
    ],
)
def test_saved_prompt_cache_continues_identically(family, options, tmp_path):
    changes = {"head_dim": 32} if options else {}
    model, tokens = tiny(family, **changes), random_tokens(LONG)
    cache = CacheState(model, **options)
    read_in_parts(cache, tokens)
    save(cache, tokens, tmp_path / "chat")
    loaded, _ = load(model, tmp_path / "chat", ids(tokens), **options)
    assert loaded.length == LONG
    for token in ids(random_tokens(12, seed=1)):
        one = mx.array([[token]])
        assert mx.array_equal(loaded.forward(one), cache.forward(one))
    if options:
        with pytest.raises(UserError, match="KVCache and RotatedKVCache of 8 bits"):
            load(model, tmp_path / "chat", kv_bits=4)
        other = tiny(family, head_dim=32, num_hidden_layers=2)
        other.model.layers[0].self_attn.k_proj.weight *= 2
        with pytest.raises(UserError, match="rotated in another way"):
            load(other, tmp_path / "chat", **options)


@pytest.fixture
def saved(tmp_path):
    """A model, and the folder of a prompt cache of it."""
    model, tokens = tiny("llama"), random_tokens(9)
    cache, folder = CacheState(model), tmp_path / "chat"
    cache.forward(tokens)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    save(cache, tokens, folder, chat)
    return model, folder


def edit(saved, change, *, signed=False):
    """Change what the metadata says, with or without its hash."""
    file = saved[1] / prompt_cache.METADATA_FILE
    content = json.loads(file.read_text())
    change(content["prompts"])
    if signed:
        prompts = prompt_cache.SavedPrompts.model_validate(content["prompts"])
        content["sha256"] = prompts.sha256
    file.write_text(json.dumps(content))


def test_load_prompt_cache_returns_what_was_saved(saved):
    _, loaded = load(*saved)
    assert loaded.nodes[0].tokens == ids(random_tokens(9))
    assert [m["content"] for m in loaded.messages] == ["hi", "ho"]


def test_load_prompt_cache_rejects_other_models(saved, tmp_path):
    with pytest.raises(UserError, match="another model"):
        load(*saved, digest="e")
    with pytest.raises(UserError, match="not a saved prompt cache"):
        load(saved[0], tmp_path / "nothing")
    with pytest.raises(UserError, match="those of the model are KVCache and Win"):
        load(tiny("gemma3"), saved[1])
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(tiny("llama", head_dim=32), saved[1])


CHANGES = {
    "a token less": lambda prompt: prompt["nodes"][0]["tokens"].pop(0),
    "tokens swapped": lambda prompt: prompt["nodes"][0]["tokens"].sort(),
    "another token": lambda prompt: prompt["nodes"][0]["tokens"].__setitem__(0, 99),
    "another message": lambda prompt: prompt["messages"].pop(),
    "another model": lambda prompt: prompt.update(digest="e"),
    "no parent": lambda prompt: prompt["nodes"][0].update(parent=7),
    "another kind": lambda prompt: prompt["kinds"].__setitem__(0, "RotatingKVCache"),
}
MALFORMED = {
    "no messages": lambda prompt: prompt.pop("messages"),
    "no tokens": lambda prompt: prompt["nodes"][0].pop("tokens"),
    "a message without text": lambda prompt: prompt["messages"][0].pop("content"),
    "a text for a token": lambda prompt: prompt["nodes"][0]["tokens"].append("x"),
    "a negative token": lambda prompt: prompt["nodes"][0]["tokens"].append(-1),
    "an unknown key": lambda prompt: prompt.update(more=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_prompt_cache_is_noticed(saved, change):
    edit(saved, CHANGES[change])
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(*saved)


@pytest.mark.parametrize("change", MALFORMED)
def test_malformed_metadata_is_refused(saved, change):
    edit(saved, MALFORMED[change])
    with pytest.raises(UserError, match="not a saved prompt cache"):
        load(*saved)


@pytest.mark.parametrize("change", ["a token less", "another kind", "no parent"])
def test_metadata_that_does_not_fit_the_arrays_is_refused(saved, change):
    edit(saved, CHANGES[change], signed=True)
    with pytest.raises(UserError, match=r"is damaged|and those of the model"):
        load(*saved)


def test_damaged_files_of_a_prompt_cache_are_refused(saved):
    arrays, metadata = (
        saved[1] / name
        for name in (prompt_cache.ARRAYS_FILE, prompt_cache.METADATA_FILE)
    )
    content = bytearray(arrays.read_bytes())
    content[-1] ^= 1
    arrays.write_bytes(content)
    with pytest.raises(UserError, match="prompt cache is damaged"):
        load(*saved)
    metadata.write_text(metadata.read_text()[:-20])
    with pytest.raises(UserError, match="not JSON"):
        load(*saved)
    for file in (arrays, metadata):  # a pipe would be read for ever
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(UserError):
            load(*saved)


def fetch(prefixes, model, tokens):
    return prefixes.fetch(tokens, lambda: CacheState(model))


def store(prefixes, model, tokens):
    """Process what the prefix cache does not have, and insert all of it."""
    cache, _ = fetch(prefixes, model, [*tokens, 0])
    if rest := tokens[cache.length :]:
        cache.forward(mx.array([rest]))
    prefixes.insert(tokens, cache)
    return cache


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
        for _ in range(2):  # the second time, all of it is stored
            resumed, matched = fetch(prefixes, model, second)
            assert resumed.length <= matched
            assert matched >= common
            if common == LONG:
                assert resumed.length >= LONG
            suffix = mx.array([second[resumed.length :]])
            expected = read_in_parts(CacheState(model), mx.array([second]))
            assert_close(resumed.forward(suffix)[:, -1], expected[:, -1])
            store(prefixes, model, second[:-1])


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_nodes_have_a_limited_number_of_arrays(family, monkeypatch):
    """Metal has 499,000 buffers for a process; short prompts take few bytes."""
    model = tiny(family)
    store(single := PrefixCache(1 << 30), model, [1, 2, 3])
    monkeypatch.setattr(prefix, "MAX_ARRAYS", 5 * single.num_arrays)
    prefixes = PrefixCache(1 << 30)
    for first in range(1, 20):
        store(prefixes, model, [first, 2, 3])
        store(prefixes, model, [first, 2, 4])
        stored = sum(len(node.arrays) for node in prefixes.nodes())
        assert prefixes.num_arrays == stored <= prefix.MAX_ARRAYS
    assert prefixes.match([19, 2, 4]) == 3
    assert prefixes.match([1, 2, 3]) == 0
    others = PrefixCache(1 << 30)
    others.sizes = 1, 1, 7  # arrays of a node, where processes hold other layers
    store(others, model, [1, 2, 3])
    store(others, model, [1, 4])
    assert others.num_arrays == 7 * len([*others.nodes()])


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_what_prompts_share_is_stored_once(family):
    model, prefixes = tiny(family), PrefixCache(1 << 30)
    tokens = ids(random_tokens(LONG))
    size = store(prefixes, model, tokens) and prefixes.nbytes
    prompt = [*tokens[:20], 1, 2, 3]
    cache, matched = fetch(prefixes, model, prompt)
    assert matched == 20
    # A recurrent state holds only where it was stored.
    assert cache.length == (0 if family == "falcon_h1" else 20)
    # A prompt that ends where the two differ stores the states there.
    store(prefixes, model, prompt[:20])
    cache, matched = fetch(prefixes, model, prompt)
    assert cache.length == matched == 20
    store(prefixes, model, prompt)
    stored = sum(len(node.tokens) for node in prefixes.nodes())
    assert stored == LONG + 3
    assert prefixes.nbytes == sum(node.nbytes for node in prefixes.nodes())
    if family == "llama":
        assert prefixes.nbytes == size * stored / LONG


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_random_prompts_in_little_memory(family):
    """Nodes are split and dropped at random, and never give a wrong prefix."""
    model, random = tiny(family), np.random.default_rng(0)
    size = store(PrefixCache(1 << 30), model, ids(random_tokens(20))).nbytes
    prefixes, reused = PrefixCache(6 * size), 0
    for _ in range(60):
        # Of few tokens, so that many prompts begin alike.
        prompt = random.integers(1, 3, random.integers(2, 24)).tolist()
        cache, matched = fetch(prefixes, model, prompt)
        reused += cache.length
        assert matched < len(prompt)
        got = cache.forward(mx.array([prompt[cache.length :]]))[:, -1]
        assert_close(got, model(mx.array([prompt]))[:, -1])
        prefixes.insert(prompt, cache)
        assert prefixes.nbytes == sum(node.nbytes for node in prefixes.nodes())
        assert prefixes.nbytes <= prefixes.max_bytes
    assert reused > 60


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_many_requests_process_a_shared_prompt_once(family):
    """The second one finds where prompts differ, the third one has the states there."""
    model = sharpened(family)
    shared = ids(random_tokens(300))
    requests = [GenerationRequest([*shared, n, 7, n], 4) for n in range(1, 9)]
    assert is_batchable(model)
    engine = Engine(model, prefix_cache=PrefixCache(1 << 30), prefill_step_size=64)
    processed, forward = [], CacheState.forward

    def counted(cache, tokens):
        processed.append(tokens.shape[1])
        return forward(cache, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CacheState, "forward", counted)
        got = run(engine, requests)
    assert got == alone(model, requests)
    again = 0 if family == "llama" else 300
    assert sum(n for n in processed if n > 1) < 300 + again + 8 * 3


def test_prefix_cache_leaves_last_token():
    model, tokens = tiny("llama"), random_tokens(9)
    prefixes = PrefixCache(1 << 30)
    store(prefixes, model, ids(tokens))
    assert fetch(prefixes, model, ids(tokens))[0].length == 8


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


@pytest.mark.parametrize(
    ("model", "first_turn"),
    [
        ("llama", ends_by_length),
        ("gemma3", ends_by_token),
        ("qwen3", ends_by_text),
        ("gemma3", abandoned),
    ],
)
def test_prefix_cache_does_not_change_next_turn(model, first_turn):
    plain = Generator(random_model(model), byte_tokenizer(), prefill_step_size=8)
    prefixes = PrefixCache(1 << 30)
    reusing = Generator(
        plain.model, plain.tokenizer, prefix_cache=prefixes, prefill_step_size=8
    )
    for seed in range(2):
        prompt = [*range(seed, 60 + seed, 2)]
        completion = first_turn(reusing, prompt)
        cache, _ = fetch(prefixes, plain.model, [*prompt, *completion, 0])
        assert cache.length >= len(prompt) + len(completion) - 1
        second = [*prompt, *completion, *range(5)]
        options = {"max_tokens": 20, "stop_tokens": ()}
        loaded = reusing.generate(second, **options)
        assert loaded.tokens == plain.generate(second, **options).tokens


def test_prefix_cache_evicts_least_recently_used():
    model, prompts = tiny("llama"), [ids(random_tokens(9, seed=n)) for n in range(4)]
    prefixes = PrefixCache(1 << 30)
    size = store(prefixes, model, prompts[0]) and prefixes.nbytes
    prefixes = PrefixCache(2 * size)
    one, two, three = prompts[1:]
    for tokens in (one, two):
        store(prefixes, model, tokens)
    fetch(prefixes, model, [*one, 1])
    store(prefixes, model, three)
    assert prefixes.nbytes <= 2 * size
    found = [fetch(prefixes, model, [*t, 1])[0].length for t in (one, two, three)]
    assert found == [9, 0, 9]
    small = PrefixCache(size - 1)
    store(small, model, prompts[0])
    assert not small.nbytes


def test_eviction_reads_few_nodes(monkeypatch):
    """Not all of them: a server keeps thousands."""
    model, count = tiny("llama"), 200
    cache = CacheState(model)
    cache.forward(mx.array([[1, 2, 3]]))
    state = PrefixCache(1 << 30)
    state.insert([1, 2, 3], cache)
    prefixes, reads = PrefixCache(count * state.nbytes), []
    get = PrefixNode.__getattribute__

    def counted(node, name):
        reads.append(id(node))
        return get(node, name)

    for number in range(2 * count):
        if number == count:
            monkeypatch.setattr(PrefixNode, "__getattribute__", counted)
        # The tokens do not matter here, and their cache may be any.
        prefixes.insert([1 + number // 20, number, 3], cache)
    monkeypatch.undo()
    assert prefixes.nbytes <= prefixes.max_bytes
    assert len(reads) < 200 * count


def test_only_ends_are_dropped():
    """Also after splits and drops of an adapter, in the order of their use."""
    model, prefixes = tiny("llama"), PrefixCache(1 << 30)
    random = np.random.default_rng(1)
    for number in range(80):
        if number == 40:
            prefixes.drop(1)
            prefixes.max_bytes = prefixes.nbytes // 2
        prompt = random.integers(1, 4, random.integers(1, 9)).tolist()
        cache = CacheState(model)
        cache.adapter = number % 2
        cache.forward(mx.array([prompt]))
        prefixes.insert(prompt, cache)
        nodes = [*prefixes.nodes()]
        in_tree = [*prefixes.roots.values()]
        for node in in_tree:
            in_tree += node.children.values()
        assert {*nodes} == {*in_tree} - {*prefixes.roots.values()}
        assert len(nodes) == len({*nodes})
        assert prefixes.nbytes == sum(node.nbytes for node in nodes)
        places = {node: place for place, node in enumerate(nodes)}
        assert all(places.get(n.parent, -1) < places[n] for n in nodes)
