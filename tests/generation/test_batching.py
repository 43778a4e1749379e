"""Continuous batching: each request gets its tokens of a single run; none starves."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.batching import BatchGenerator, GenerationRequest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.batch import merge, require_batchable
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.models.loader import make_cache
from test_kv_cache import tiny as family_model
from tiny_families import FAMILIES, VOCABULARY, WINDOW, member
from tiny_generators import byte_tokenizer, tiny

STEPS = 2 * WINDOW
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_p=0.9, seed=4),
    Sampling(repetition_penalty=1.3),
    Sampling(logit_bias=((5, 4.0),), frequency_penalty=0.3),
]


def some_requests(count, vocabulary, seed=0, longest=60):
    draw = np.random.default_rng(seed)
    return [
        GenerationRequest(
            draw.integers(1, vocabulary, int(draw.integers(1, longest))).tolist(),
            max_tokens=int(draw.integers(1, 24)),
            sampling=SETTINGS[int(draw.integers(0, len(SETTINGS)))],
            stop_tokens=frozenset(draw.integers(0, vocabulary, 5).tolist()),
        )
        for _ in range(count)
    ]


def run_all(batcher, requests, arrivals=1):
    """Tokens by request, with `arrivals` new requests per step."""
    completions = {id(request): [] for request in requests}
    waiting = list(requests)
    while waiting or not batcher.idle:
        for request in waiting[:arrivals]:
            batcher.submit(request)
        del waiting[:arrivals]
        for request, token, _ in batcher.step():
            completions[id(request)].append(token)
    return [completions[id(request)] for request in requests]


def generate_alone(model, request, tokenizer):
    responses = Generator(model, tokenizer, prefill_step_size=16).stream(
        request.prompt,
        max_tokens=request.max_tokens,
        sampling=request.sampling,
        stop_tokens=request.stop_tokens,
    )
    return [response.token for response in responses]


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 80), pytest.param("gemma3", 32, marks=pytest.mark.slow)],
)
def test_batch_generator_matches_single_requests(name, count):
    model, tokenizer = tiny(name), byte_tokenizer()
    requests = some_requests(count, 256)
    batcher = BatchGenerator(model, max_batch_size=16, prefill_step_size=16)
    completions = run_all(batcher, requests, arrivals=3)
    assert completions == [
        generate_alone(model, request, tokenizer) for request in requests
    ]
    assert len({tuple(tokens) for tokens in completions}) > 0.75 * count
    assert batcher.idle
    assert not batcher.nbytes


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba", "deepseek_v3"])
def test_batch_generator_supports_other_caches(family):
    model = family_model(family)
    requests = some_requests(12, VOCABULARY, longest=40)
    completions = run_all(
        BatchGenerator(model, max_batch_size=5, prefill_step_size=8), requests
    )
    tokenizer = byte_tokenizer()
    assert completions == [
        generate_alone(model, request, tokenizer) for request in requests
    ]


def decoded(model, prompts, *, together: bool) -> mx.array:
    """Logits [B, steps, V] of the tokens after prompts of unequal lengths."""
    states = [CacheState(model) for _ in prompts]
    if together:
        states = [make_cache(model) for _ in prompts]
    for state, prompt in zip(states, prompts, strict=True):
        if together:
            model(prompt[None, :-STEPS], cache=state)
        else:
            state.forward(prompt[None, :-STEPS])
    steps = mx.stack([prompt[-STEPS:] for prompt in prompts])
    if not together:
        rows = zip(states, steps, strict=True)
        logits = [[s.forward(token[None, None]) for token in row] for s, row in rows]
        return mx.concatenate([mx.concatenate(row, axis=1) for row in logits])
    caches = merge(states)
    logits = [model(column[:, None], cache=caches) for column in steps.T]
    return mx.concatenate(logits, axis=1)


SHOWN = ("gemma2", "gemma3n", "plamo3")


@pytest.fixture
def _uncompiled():
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize(
    "family",
    [f if f in SHOWN else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_ragged_batches_have_the_logits_of_their_sequences(family):
    model = member(family).eval()
    require_batchable(model)
    draw = np.random.default_rng(0)
    # As many as gemma2's heads, and more; prompts before, at and after the window.
    lengths = [STEPS + n for n in (3 * WINDOW, 2, WINDOW - 1)]
    prompts = [mx.array(draw.integers(1, VOCABULARY, n)) for n in lengths]
    for count in (1, 2, 3):
        alone = decoded(model, prompts[:count], together=False)
        off = decoded(model, prompts[:count], together=True) - alone
        assert mx.abs(off).max() <= 1e-4 * mx.abs(alone).max()


@pytest.mark.parametrize("family", ["afm7", "gemma2"])
def test_batches_that_differ_from_their_sequences_are_refused(family, monkeypatch):
    """AFM reads one offset for all rows; gemma2 as mlx-lm has it mixes up its mask."""
    model = member(family).eval()
    if family == "gemma2":
        attention = type(model.layers[0].self_attn)
        monkeypatch.setattr(attention, "__call__", attention.__call__.__wrapped__)
    with pytest.raises(UserError, match="cannot decode several sequences together"):
        BatchGenerator(model)


def test_batch_generator_rejects_caches_without_merge():
    from mlx_lm.models.cache import ChunkedKVCache

    model = tiny("llama")
    model.make_cache = lambda: [ChunkedKVCache(8) for _ in model.layers]
    with pytest.raises(UserError, match="ChunkedKVCache"):
        BatchGenerator(model)


def test_batch_generator_decodes_during_long_prefill():
    batcher = BatchGenerator(tiny("llama"), max_batch_size=4, prefill_step_size=8)
    short, long = (
        GenerationRequest([1, 2], max_tokens=40),
        GenerationRequest([1] * 200, max_tokens=2),
    )
    late = GenerationRequest([3], max_tokens=3)
    for request in (short, long, late):
        batcher.submit(request)
    order = []
    while not batcher.idle:
        order += [request for request, _, _ in batcher.step()]
    # The short request gets a token at every step while the long prompt is prefilled.
    assert order.index(long) >= 20
    assert order[: order.index(long)].count(short) >= 20
    assert order.index(late) > order.index(long)
    assert order.count(long) == 2
    assert order.count(late) == 3


def test_batch_generator_keeps_request_order_when_full():
    batcher = BatchGenerator(tiny("llama"), max_batch_size=2)
    requests = [GenerationRequest([number + 1], max_tokens=4) for number in range(7)]
    for request in requests:
        batcher.submit(request)
    firsts = []
    while not batcher.idle:
        for request, _, _ in batcher.step():
            if request not in firsts:
                firsts.append(request)
        assert len(batcher._batch) <= 2
    assert firsts == requests


def test_cancel_frees_cache_and_stops_output():
    model = tiny("llama")
    batcher = BatchGenerator(model, max_batch_size=4)
    cancelled, remaining = (
        GenerationRequest([1] * 300, max_tokens=99),
        GenerationRequest([2] * 20, max_tokens=9),
    )
    waiting_request = GenerationRequest([3] * 20, max_tokens=9)
    for request in (cancelled, remaining):
        batcher.submit(request)
    completions = [batcher.step() for _ in range(4)]
    assert any(request is cancelled for step in completions for request, _, _ in step)
    before = batcher.nbytes
    batcher.submit(waiting_request)
    batcher.cancel(cancelled)
    batcher.cancel(waiting_request)
    after = batcher.step()
    assert {request for request, _, _ in after} == {remaining}
    assert 0 < batcher.nbytes < before
    while not batcher.idle:
        after += batcher.step()
    assert {request for request, _, _ in after} == {remaining}
    assert not batcher.nbytes


def test_cancel_does_not_change_other_requests():
    model, tokenizer = tiny("gemma3"), byte_tokenizer()
    requests = some_requests(9, 256, seed=5)
    batcher = BatchGenerator(model, max_batch_size=9)
    for request in requests:
        batcher.submit(request)
    completions = {id(request): [] for request in requests}
    for number in range(60):
        for request, token, _ in batcher.step():
            completions[id(request)].append(token)
        if number == 3:
            batcher.cancel(requests[0])
    for request in requests[1:]:
        assert completions[id(request)] == generate_alone(model, request, tokenizer)


def test_batch_generator_launches_next_step_early():
    model = tiny("llama")
    calls = []

    class Recorder:
        layers, args = model.layers, model.args

        def __call__(self, tokens, cache=None):
            calls.append(tokens.shape)
            return model(tokens, cache=cache)

    batcher = BatchGenerator(Recorder())
    calls.clear()
    batcher.submit(GenerationRequest([1], max_tokens=3))
    assert batcher.step() == []
    assert len(batcher.step()) == 1
    assert calls == [(1, 1), (1, 1)]
    while not batcher.idle:
        batcher.step()
    assert calls == [(1, 1)] * 3
