"""Log-probabilities of prompts: those of a forward pass, and nothing else changes."""

from dataclasses import replace

import mlx.core as mx
import pytest
from lmx.generation import scheduler
from lmx.generation.engine import Engine
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from test_engine_equality import SAMPLINGS, model_of, proposer_maker
from tiny_families import VOCABULARY
from tiny_requests import alone, some_requests

pytestmark = pytest.mark.fused

SHORT = GenerationRequest([7], 3, prompt_logprobs=True, top_logprobs=2)


def scored(engine, requests):
    """The tokens of every request, and the log-probabilities of its prompt."""
    tokens = {request: [] for request in requests}
    prompts = {}
    for output in engine.run(requests):
        tokens[output.request].append(output.token)
        first = len(tokens[output.request]) == 1
        if first:
            prompts[output.request] = output.prompt_logprobs
        assert first or not output.prompt_logprobs
    return [*tokens.values()], prompts


def check_scores(model, request, scores):
    rows = model(mx.array([request.prompt]))[0].astype(mx.float32)
    rows = (rows - mx.logsumexp(rows, axis=-1, keepdims=True)).tolist()
    assert len(scores) == len(request.prompt) - 1
    for row, token, score in zip(rows, request.prompt[1:], scores, strict=False):
        assert score.chosen == pytest.approx(row[token], abs=1e-4)
        best = sorted(row, reverse=True)[: request.top_logprobs]
        assert [value for _, value in score.top] == pytest.approx(best, abs=1e-4)
        named = [row[token] for token, _ in score.top]
        assert named == pytest.approx(best, abs=1e-4)


def requests_of(count):
    """Every second one wants them; each prompt comes twice, one begins with another."""
    requests = some_requests(count, SAMPLINGS["all"], longest=60)
    requests[2] = replace(requests[2], prompt=[*requests[0].prompt, 1, 2])
    wanted = [
        replace(request, prompt_logprobs=True, top_logprobs=number % 3)
        for number, request in enumerate(requests)
    ]
    return [each for pair in zip(requests, wanted, strict=True) for each in pair]


@pytest.mark.parametrize(
    ("family", "proposer", "prefix"),
    [
        ("llama", None, False),
        ("llama", "draft", True),
        ("gemma3_text", "lookup", True),
        ("qwen3_next", None, True),
    ],
)
def test_prompts_are_scored_in_batches(family, proposer, prefix):
    model, requests = model_of(family), [*requests_of(5), SHORT]
    engine = Engine(
        model,
        max_batch_size=4,
        prefill_step_size=24,
        make_proposer=proposer and proposer_maker(proposer, family, model),
        draft_length=DraftLengthController(fixed=3 if proposer else None),
        prefix_cache=PrefixCache(1 << 30) if prefix else None,
    )
    expected = alone(model, requests)
    for _ in range(2 if prefix else 1):  # the second time, prefixes are there
        tokens, prompts = scored(engine, requests)
        assert tokens == expected
        for request in requests:
            if request.prompt_logprobs:
                check_scores(model, request, prompts[request])
            else:
                assert not prompts[request]


def test_a_preempted_prompt_is_scored_once(monkeypatch):
    monkeypatch.setattr(scheduler, "HEADROOM", 4)
    monkeypatch.setattr(scheduler, "MIN_HEADROOM", 1)
    model = model_of("llama")
    requests = [
        GenerationRequest([*range(1, 4 + n)], 24, prompt_logprobs=True)
        for n in range(6)
    ]
    memory = 60 * sum(CacheState(model).bytes_by_capacity().values())
    engine = Engine(model, kv_memory=memory)
    tokens, prompts = scored(engine, requests)
    assert engine.preemptions > 2
    assert tokens == alone(model, requests)
    for request in requests:
        check_scores(model, request, prompts[request])


def test_long_prompts_are_scored_in_parts():
    model = model_of("llama")
    prompt = [n % (VOCABULARY - 1) + 1 for n in range(190)]
    request = GenerationRequest(prompt, 1, prompt_logprobs=True)
    _, prompts = scored(Engine(model), [request])
    check_scores(model, request, prompts[request])
