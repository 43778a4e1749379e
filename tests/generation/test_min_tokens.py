"""No stop token comes before the fewest tokens, whatever else the engine does."""

from dataclasses import replace

import mlx.core as mx
import pytest
from lmx.generation import scheduler
from lmx.generation.engine import Engine
from lmx.generation.grammar import Grammar
from lmx.generation.grammar_matcher import GrammarCompiler
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sequence import GenerationRequest, TokenOutput
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.text_stream import TextStream
from lmx.generation.thinking import thinking_of
from test_engine_equality import SAMPLINGS, model_of, proposer_maker
from tiny_generators import byte_tokenizer, thinking_tokenizer, tiny
from tiny_requests import alone, run, some_requests

pytestmark = pytest.mark.fused

STOPS = frozenset(range(0, 40, 3))
"""So many that completions are short."""


def requests_of(count):
    requests = some_requests(count, SAMPLINGS["all"], longest=40)
    return [
        replace(each, max_tokens=24, stop_tokens=STOPS, min_tokens=[0, 9, 30][n % 3])
        for n, each in enumerate(requests)
    ]


def reference(model, request):
    """The most likely tokens that may come, without a cache."""
    tokens = []
    while len(tokens) < request.max_tokens:
        logits = model(mx.array([[*request.prompt, *tokens]]))[0, -1].tolist()
        for token in request.stop_tokens if len(tokens) < request.min_tokens else ():
            logits[token] = float("-inf")
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
        if tokens[-1] in request.stop_tokens:
            break
    return tokens


def test_greedy_tokens_are_the_most_likely_that_may_come():
    model = model_of("llama")
    requests = [replace(r, sampling=SAMPLINGS["greedy"][0]) for r in requests_of(6)]
    expected = [reference(model, request) for request in requests]
    assert run(Engine(model), requests) == expected
    # Negative control.
    free = [replace(request, min_tokens=0) for request in requests]
    assert run(Engine(model), free) != expected


@pytest.mark.parametrize(
    ("family", "proposer", "prefix"),
    [
        ("llama", None, True),
        ("llama", "draft", True),
        ("gemma3_text", "lookup", False),
        ("qwen3_next", "draft", False),
    ],
)
def test_in_batches_and_with_drafts(family, proposer, prefix):
    model, requests = model_of(family), requests_of(9)
    engine = Engine(
        model,
        max_batch_size=5,
        make_proposer=proposer and proposer_maker(proposer, family, model),
        draft_length=DraftLengthController(fixed=3 if proposer else None),
        prefix_cache=PrefixCache(1 << 30) if prefix else None,
    )
    expected = alone(model, requests)
    for seed in range(2 if prefix else 1):
        assert run(engine, requests, seed=seed) == expected
    for request, tokens in zip(requests, expected, strict=True):
        stops = [n for n, token in enumerate(tokens) if token in STOPS]
        assert all(n >= request.min_tokens for n in stops)
        assert stops or len(tokens) == request.max_tokens
    lengths = {len(t) for r, t in zip(requests, expected, strict=True) if r.min_tokens}
    assert len(lengths) > 1, "a stop token ends some of them later"


def test_preempted_requests_keep_their_count(monkeypatch):
    monkeypatch.setattr(scheduler, "HEADROOM", 4)
    monkeypatch.setattr(scheduler, "MIN_HEADROOM", 1)
    model = model_of("llama")
    requests = [
        GenerationRequest([*range(1, 4 + n)], 24, stop_tokens=STOPS, min_tokens=12 + n)
        for n in range(6)
    ]
    memory = 60 * sum(CacheState(model).bytes_by_capacity().values())
    engine = Engine(model, kv_memory=memory)
    assert run(engine, requests) == alone(model, requests)
    assert engine.preemptions > 2


@pytest.mark.parametrize("lookup", [False, True])
def test_with_a_grammar_and_a_chain_of_thought(lookup):
    """A text that is complete ends, and one that may go on does."""
    tokenizer, model = thinking_tokenizer(), tiny("llama")
    compiler, (stop,) = GrammarCompiler(tokenizer), tokenizer.eos_token_ids
    make_proposer = proposer_maker("lookup", "llama", model) if lookup else None
    for grammar, shortest in (
        (Grammar.choice(["on", "off"]), 2),
        (Grammar("regex", "[ab]{1,90}"), 20),
    ):
        prompt = tokenizer.encode("a<|end|>", add_special_tokens=False)
        request = GenerationRequest(
            prompt,
            300,
            SAMPLINGS["sampled"][0],
            frozenset([stop]),
            grammar=compiler.compile(grammar),
            min_tokens=40,
            thinking=thinking_of(tokenizer, prompt, 6),
        )
        engine = Engine(model, make_proposer=make_proposer)
        (tokens,) = run(engine, [request])
        assert tokens[-1] == stop
        text = tokenizer.decode(tokens[tokens.index(259) + 1 : -1]).strip()
        assert len(text) >= shortest
        assert set(text) <= set("onfab")
        assert (len(tokens) > 40) == (shortest > 2)
        assert alone(model, [request]) == [tokens]


def test_stop_strings_count_from_there():
    tokenizer = byte_tokenizer()
    text = "xabxab-ab"
    for least, expected in (
        (0, "x"),
        (2, "x"),
        (3, "xabx"),
        (5, "xabx"),
        (7, "xabxab-"),
    ):
        request = GenerationRequest([1], 99, min_tokens=least)
        stream, out = TextStream(tokenizer, request, ["ab"]), ""
        for token in tokenizer.encode(text):
            response = stream.add(TokenOutput(request, token, False))
            out += response.text if response else ""
        assert (out, stream.finish_reason) == (expected, "stop"), least
