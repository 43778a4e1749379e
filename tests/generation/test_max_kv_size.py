"""Keys and values of at most N tokens: the window of mlx-lm, and SnapKV."""

import argparse
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lmx.cli import serve
from lmx.config.evaluate import EvaluateConfig
from lmx.errors import UserError
from lmx.evaluation.parity import check_parity
from lmx.generation import scheduler
from lmx.generation.engine import Engine
from lmx.generation.kv_cache import eviction
from lmx.generation.kv_cache.eviction import (
    SINKS,
    KVLimit,
    ObservedQueries,
    kv_limit,
)
from lmx.generation.kv_cache.layer_rows import WINDOW_SLACK, AttentionRows
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.prompt_cache import load_prompt_cache, save_prompt_cache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest, RunningSequence
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.interfaces import SINGLE_PROCESS
from lmx.models.loader import load, make_cache
from lmx.pipeline.evaluate.metrics import Measured
from test_engine_equality import (
    SAMPLINGS,
    differences,
    model_of,
    proposer_maker,
    tokens_alone,
)
from test_kv_cache import assert_close, random_tokens, tiny
from tiny_dflash import random_target
from tiny_generators import tiny as tiny_generator_model
from tiny_requests import alone, noisy, run, some_requests

SIZE = 12
WINDOW, SNAPKV = KVLimit(SIZE), KVLimit(SIZE, "snapkv")
# Full attention, beside windows and recurrent states, shared keys, latent, nested.
SHOWN = ["llama", "gemma3_text", "qwen3_next", "gemma3n", "deepseek_v3", "falcon_h1"]


BASE = Path(__file__).parents[2] / "data/tiny-base"


@pytest.fixture(autouse=True)
def _few_observed_queries(monkeypatch):
    monkeypatch.setattr(eviction, "OBSERVED", 4)


def two_heads():
    changes = {"head_dim": 32, "num_key_value_heads": 2}
    return noisy(random_target("llama", **changes)[0], 0.1)


def rotating(cache):
    """What `--max-kv-size` of mlx-lm has in place of a cache."""
    from mlx_lm.models.cache import RotatingKVCache

    if hasattr(cache, "caches"):
        cache.caches = tuple(map(rotating, cache.caches))
    is_full = type(cache).__name__ == "KVCache"
    return RotatingKVCache(SIZE, keep=4) if is_full else cache


# Window


@pytest.mark.parametrize("family", SHOWN)
def test_a_window_is_the_rotating_cache_of_mlx_lm(family):
    """Token for token, past the end of the ring; also when they come many at a time."""
    model = noisy(tiny(family), 0.1)
    tokens = random_tokens(SIZE + WINDOW_SLACK + 30)
    theirs = [*map(rotating, make_cache(model))]
    ours, joined = (CacheState(model, kv_limit=WINDOW) for _ in range(2))
    expected = []
    for token in mx.split(tokens, tokens.shape[1], axis=1):
        expected.append(model(token, cache=theirs))
        assert_close(ours.forward(token), expected[-1])
    expected, start = mx.concatenate(expected, axis=1), 0
    for end in (3, 9, 79, 80, tokens.shape[1]):
        part = joined.forward(tokens[:, start:end])
        assert_close(part, expected[:, start:end])
        start = end
    whole = CacheState(model).forward(tokens)
    assert mx.abs(whole - expected)[:, :SIZE].max() < 1e-4
    assert mx.abs(whole - expected)[:, SIZE:].max() > 1e-2


def test_rollback_in_a_window():
    model, tokens = noisy(tiny("llama"), 0.1), random_tokens(200)
    whole = CacheState(model, kv_limit=WINDOW).forward(tokens)
    state = CacheState(model, kv_limit=WINDOW)
    for start in range(0, 190, 9):
        state.checkpoint()
        state.forward(random_tokens(WINDOW_SLACK, seed=start))
        state.rollback(WINDOW_SLACK)
        assert_close(
            state.forward(tokens[:, start : start + 9]), whole[:, start : start + 9]
        )


@pytest.mark.parametrize("family", ["mamba", "deepseek_v32"])
def test_models_without_a_window_are_refused(family):
    with pytest.raises(UserError, match="of this model cannot be limited"):
        CacheState(tiny(family), kv_limit=WINDOW)


def test_a_model_that_ignores_the_mask_is_refused(monkeypatch):
    """The control: some architectures apply none to a single token."""
    original = AttentionRows.make_mask

    def make_mask(self, length, *arguments, **options):
        return original(self, length, *arguments, **options) if length > 1 else None

    monkeypatch.setattr(AttentionRows, "make_mask", make_mask)
    with pytest.raises(UserError, match="tokens outside of a window"):
        CacheState(tiny("llama"), kv_limit=WINDOW)


# SnapKV


def test_what_the_last_queries_attend_to_is_kept():
    """Against float64; two query heads share a head of keys."""
    draw, length, size, scale = np.random.default_rng(0), 60, 8, 0.7
    queries = draw.normal(size=(1, 4, length, size))
    keys = draw.normal(size=(1, 2, length, size))
    observed = ObservedQueries()
    for start, end in ((0, 50), (50, 51), (51, 60)):
        part = mx.array(queries[:, :, start:end])
        observed.add(part, None, scale, end)
        observed.add(part + 1, None, scale, end)  # of a layer that shares the keys
    kept = np.array(observed.most_attended(mx.array(keys), 20, SINKS))
    for head in range(2):
        weights = np.zeros(length)
        for row in range(length - eviction.OBSERVED, length):
            for query in queries[0, 2 * head : 2 * head + 2, row]:
                scores = np.exp(scale * keys[0, head, : row + 1] @ query)
                weights[: row + 1] += scores / scores.sum()
        weights = weights[SINKS : -eviction.OBSERVED]
        margin = eviction.POOLED // 2
        pooled = [
            weights[max(0, i - margin) : i + margin + 1].max()
            for i in range(len(weights))
        ]
        count = 20 - SINKS - eviction.OBSERVED
        chosen = kept[0, head, SINKS : -eviction.OBSERVED] - SINKS
        assert len({*chosen.tolist()}) == count
        values = [pooled[i] for i in chosen]
        assert values == sorted(values)
        np.testing.assert_allclose(values, np.sort(pooled)[-count:], rtol=1e-5)
        assert kept[0, head, :SINKS].tolist() == [0, 1, 2, 3]
        assert kept[0, head, -eviction.OBSERVED :].tolist() == [56, 57, 58, 59]


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_selected_entries_are_those_of_the_prompt(kv_bits, monkeypatch):
    """All arrays of keys and values, with codes too; other ones for each head."""
    model, tokens = two_heads(), random_tokens(80)
    kept = mx.array([[*range(4), *range(40, 47)], [*range(4), *range(73, 80)]])
    monkeypatch.setattr(ObservedQueries, "most_attended", lambda *_: kept[None])
    states = [
        CacheState(model, kv_bits=kv_bits, kv_limit=limit)
        for limit in (SNAPKV, KVLimit(200))
    ]
    for state in states:
        state.forward(tokens)
        state.end_prompt()
    for ours, whole in zip(*(state.layer_caches for state in states), strict=True):
        pairs = zip(ours.entries(ours.first, 80), whole.entries(0, 80), strict=True)
        for selected, entries in pairs:
            assert mx.array_equal(selected[0, 0], entries[0, 0, kept[0]])
            assert mx.array_equal(selected[0, 1], entries[0, 1, kept[1]])


def test_snapkv_of_as_many_tokens_as_there_are_is_exact():
    model = model_of("llama")
    requests = [
        GenerationRequest([*range(1, 40)], 24, each) for each in SAMPLINGS["all"]
    ]
    limit = KVLimit(39 + 24, "snapkv")
    assert run(Engine(model, kv_limit=limit), requests) == alone(model, requests)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_snapkv_needs_to_observe_the_attention(family):
    """gemma2 computes its own attention, and latent attention expands its keys."""
    CacheState(tiny(family), kv_limit=WINDOW)
    with pytest.raises(UserError, match="queries of its attention") as info:
        CacheState(tiny(family), kv_limit=SNAPKV)
    assert info.value.hint == "use the policy window"


# The engine


@pytest.mark.parametrize("limit", [WINDOW, SNAPKV], ids=["window", "snapkv"])
@pytest.mark.parametrize(
    ("family", "proposer", "options"),
    [
        ("llama", "draft", {"prefix": True}),
        ("llama", "lookup", {"model": two_heads, "kv_bits": [4, 16]}),
        ("gemma3_text", None, {"prefix": True}),
        ("qwen3_next", "lookup", {}),
    ],
)
def test_requests_in_batches_get_their_tokens_alone(family, proposer, options, limit):
    options = options | {"model": options["model"]()} if "model" in options else options
    count, engine = differences(family, proposer, kv_limit=limit, **options)
    assert count == 0
    assert bool(engine.stats.rounds) == bool(proposer)


@pytest.mark.parametrize("limit", [WINDOW, SNAPKV], ids=["window", "snapkv"])
def test_the_limit_changes_tokens(limit):
    """The control of the test above."""
    requests = some_requests(8, SAMPLINGS["all"], longest=40)
    limited = alone(model_of("llama"), requests, kv_limit=limit)
    assert limited != tokens_alone("llama", "all", 0)


def preempted(limit, monkeypatch, **options):
    """Whether requests that are preempted get the tokens that they get alone."""
    monkeypatch.setattr(scheduler, "HEADROOM", 4)
    monkeypatch.setattr(scheduler, "MIN_HEADROOM", 1)
    model = model_of("llama")
    requests = [
        GenerationRequest([*range(1, 24 + n)], 40, SAMPLINGS["all"][n])
        for n in range(5)
    ]
    per_token = sum(CacheState(model).bytes_by_capacity().values())
    engine = Engine(model, kv_limit=limit, kv_memory=120 * per_token, **options)
    expected = alone(model, requests, kv_limit=limit)
    got = run(engine, requests)
    assert engine.preemptions > 1
    return got == expected


@pytest.mark.parametrize("limit", [WINDOW, SNAPKV], ids=["window", "snapkv"])
@pytest.mark.parametrize("has_prefixes", [False, True])
def test_preempted_requests_go_on_with_the_same_tokens(
    limit, has_prefixes, monkeypatch
):
    options = {"prefix_cache": PrefixCache(1 << 30)} if has_prefixes else {}
    options["make_proposer"] = proposer_maker("lookup", "llama", model_of("llama"))
    options["draft_length"] = DraftLengthController(fixed=3)
    assert preempted(limit, monkeypatch, **options)


def test_a_selection_at_another_token_is_found(monkeypatch):
    """The control: after a preemption, it is made where the request has come to."""
    monkeypatch.setattr(RunningSequence, "prompt_end", property(lambda self: -1))
    assert not preempted(SNAPKV, monkeypatch)


def test_prefixes_give_snapkv_the_same_tokens():
    """Its queries are computed again, and what it has selected is not reused."""
    model, prompt = model_of("llama"), [*range(1, 60)]
    engine = Engine(model, kv_limit=SNAPKV, prefix_cache=PrefixCache(1 << 30))
    first = GenerationRequest(prompt, 20)
    [tokens] = run(engine, [first])
    requests = [first, GenerationRequest([*prompt, *tokens, 5, 9], 20)]
    assert run(engine, requests) == alone(model, requests, kv_limit=SNAPKV)
    *_, last = list(engine.run([first]))
    assert last.cached_tokens == len(prompt) - eviction.OBSERVED - 1


@pytest.mark.parametrize("limit", [WINDOW, SNAPKV], ids=["window", "snapkv"])
def test_memory_is_flat_over_20_000_tokens(limit):
    model = tiny("llama", max_position_embeddings=1 << 15)
    state, tokens = CacheState(model, kv_limit=limit), random_tokens(20_000)
    state.prefill(tokens[:, :400], step_size=200)
    state.end_prompt()
    expected = Engine(model, kv_limit=limit)._facts.cache_bytes(20_000)
    for start in range(400, 20_000, 50):
        state.forward(tokens[:, start : start + 50])
        state.evaluate()
        assert state.nbytes == expected
    full = CacheState(model).bytes_by_capacity()
    assert 250 * expected < sum(full.values()) * 20_000


def test_a_long_prompt_takes_little_memory():
    """The window's; that of snapkv is stored until it ends."""
    model = tiny("llama", max_position_embeddings=1 << 15)
    prompt, bounds = random_tokens(9000)[0].tolist(), {}
    for limit in (WINDOW, SNAPKV):
        engine = Engine(model, kv_limit=limit)
        engine.add_request(GenerationRequest(prompt, 40))
        sizes = []
        while not engine.idle:
            engine.step()
            sizes.append(engine.nbytes)
        bounds[limit] = engine._facts.cache_bytes(10_000)
        assert sizes[-2] <= bounds[limit]
        assert (max(sizes) > 50 * bounds[limit]) == (limit is SNAPKV)


def test_the_scheduler_knows_the_limit():
    model = tiny("gemma3_text", num_hidden_layers=4, sliding_window_pattern=4)
    [window, full] = sorted(CacheState(model).bytes_by_capacity().items())
    slack = {None: 10**6, WINDOW: SIZE + WINDOW_SLACK, SNAPKV: SIZE + WINDOW_SLACK}
    for limit, most in slack.items():
        facts = Engine(model, kv_limit=limit)._facts
        for length in (5, 50, 100, 1000):
            expected = window[1] * min(length, window[0])
            running = expected + full[1] * min(length, most)
            assert facts.cache_bytes(length) == running
            in_prompt = length if limit is SNAPKV else min(length, most)
            prompt = facts.cache_bytes(length, in_prompt=True)
            assert prompt == expected + full[1] * in_prompt


@pytest.mark.parametrize(
    ("limit", "prompt_length", "fits"),
    [
        (None, 10, False),
        (WINDOW, 7000, True),
        (SNAPKV, 10, True),
        (SNAPKV, 7000, False),
    ],
)
def test_requests_that_do_not_fit_are_refused(limit, prompt_length, fits):
    model = tiny("llama", max_position_embeddings=1 << 15)
    per_token = sum(CacheState(model).bytes_by_capacity().values())
    engine = Engine(model, kv_limit=limit, kv_memory=int(6000.5 * per_token))
    request = GenerationRequest([1] * prompt_length, 8000 - prompt_length)
    if fits:
        engine.require_memory(request)
        return
    with pytest.raises(UserError, match="the KV cache of 8,000 tokens") as info:
        engine.require_memory(request)
    assert info.value.hint.startswith("6,000 tokens fit: ")


@pytest.mark.parametrize("limit", [WINDOW, SNAPKV], ids=["window", "snapkv"])
def test_parity_is_that_of_the_same_limit(limit):
    model = tiny_generator_model("llama")
    prompt = [5, 9, 200, 31, 5, 9] * 6
    make_proposer = proposer_maker("lookup", "llama", model)
    engine = Engine(
        model,
        kv_limit=limit,
        make_proposer=make_proposer,
        draft_length=DraftLengthController(fixed=4),
    )
    [tokens] = run(engine, [GenerationRequest(prompt, 60)])
    check = partial(check_parity, prompt=prompt, completion=tokens, sampling=Sampling())
    assert engine.stats.rounds
    assert not check(engine.new_cache()).mismatches
    assert check(CacheState(model)).mismatches


# Where the limit is named


def test_a_saved_window_needs_the_same_limit(tmp_path):
    model, tokens = model_of("llama"), random_tokens(100)[0].tolist()
    engine = Engine(model, kv_limit=WINDOW, prefix_cache=PrefixCache(1 << 30))
    [more] = run(engine, [GenerationRequest(tokens, 9)])
    kinds = engine.new_cache().kinds
    save_prompt_cache(engine.prefixes, tmp_path / "saved", kinds=kinds, digest="a")
    for limit in (WINDOW, KVLimit(SIZE + 1), SNAPKV, None):
        other = Engine(model, kv_limit=limit, prefix_cache=PrefixCache(1 << 30))
        load = partial(load_prompt_cache, other.prefixes, tmp_path / "saved")
        if limit is not WINDOW:
            with pytest.raises(UserError, match="WindowCache of 12 positions") as info:
                load(new_cache=other.new_cache, digest="a")
            assert "max_kv_size" in info.value.hint
            continue
        load(new_cache=other.new_cache, digest="a")
        request = GenerationRequest([*tokens, *more, 7], 9)
        *_, last = outputs = list(other.run([request]))
        assert last.cached_tokens == len(tokens) + len(more) - 1
        [expected] = alone(model, [request], kv_limit=WINDOW)
        assert [output.token for output in outputs] == expected


def test_the_recipe_names_the_limit():
    config = EvaluateConfig(max_kv_size=64, kv_policy="snapkv")
    limit = kv_limit(config.max_kv_size, config.kv_policy)
    measured = Measured("base", load(BASE), [], None, limit)
    assert measured.generator().engine.new_cache().kv_limit == KVLimit(64, "snapkv")
    for wrong, message in (
        ({"kv_policy": "window"}, "kv_policy needs max_kv_size"),
        ({"max_kv_size": 63}, "greater than or equal to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            EvaluateConfig(**wrong)


def test_the_server_has_the_limit(tmp_path):
    """Its prefixes on the disk are those of windows of this size."""
    parser, hashes = argparse.ArgumentParser(), []
    serve.add_serve_arguments(parser)
    for limit in (None, KVLimit(64, "snapkv"), KVLimit(64), KVLimit(65)):
        words = [str(BASE), "--prefix-cache-dir", str(tmp_path)]
        if limit:
            words += ["--max-kv-size", str(limit.max_size)]
            words += ["--kv-policy", limit.policy]
        served = serve._load(parser.parse_args(words), SINGLE_PROCESS)
        engine = served.generator.engine
        assert engine.new_cache().kv_limit == limit
        hashes.append(engine.prefixes._disk.model_hash(0))
    # What snapkv stores is a whole prompt, as without a limit.
    assert hashes[0] == hashes[1]
    assert len({*hashes}) == 3
