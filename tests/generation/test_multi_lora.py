"""Several adapters in one batch: a request gets the tokens of its adapter alone."""

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.config.lora import LoRAConfig
from lmx.errors import UserError
from lmx.generation.engine import Engine
from lmx.generation.kv_cache.batch import CacheBatch
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import draft_model_proposer
from lmx.models.lora import lora_model, multi_lora
from lmx.models.lora import multi_lora_layers as layers
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_families import VOCABULARY, member
from tiny_requests import alone, run, some_requests

pytestmark = pytest.mark.fused

FAMILIES = [
    *("llama", "gemma3_text", "qwen3_moe", "qwen3_next", "deepseek_v3", "falcon_h1"),
    "nemotron_h",
]
MIXTURES = ["qwen3_moe", "qwen3_next", "nemotron_h"]
ADAPTERS = {"wide": (8, "*"), "narrow": (2, "*self_attn*"), "deep": (4, "*mlp*")}
"""Rank, and a pattern of the layers that it may have."""
SETTINGS = [Sampling(), Sampling(1.0, seed=3)]


def base(family, *, bits=None):
    model = member(family)
    if bits:
        mode = {"mode": bits, "bits": 4} if bits == "mxfp4" else {"bits": bits}
        nn.quantize(model, group_size=32, **mode, class_predicate=is_wide)
    return model


def is_wide(path, module):
    # Experts of width 16 stay dense: a group has both kinds.
    kinds = (lora_model.LINEAR, lora_model.EXPERTS)
    return lora_model.layer_kind(module) in kinds and module.weight.shape[-1] % 32 == 0


def adapted(model, name, *, seed=0, inside=True, adapter_type="lora"):
    """The model with an adapter that changes its tokens."""
    rank, pattern = ADAPTERS[name]
    targets = lora_model.find_target_modules(model)
    keys = {t.key for t in targets if t.inside == inside}
    matching = {key for key in keys if fnmatchcase(key, pattern)} or keys
    config = LoRAConfig(type=adapter_type, target_modules=dict.fromkeys(matching, rank))
    lora_model.attach(model, config, seed=seed)
    draw = iter(mx.random.split(mx.random.key(seed + 7), 4096))
    for layer in lora_model.adapted_layers(model).values():
        noise = mx.random.normal(layer.lora_b.shape, key=next(draw))
        layer.lora_b = 0.3 * noise
    model.eval()
    return model


@lru_cache
def expected(family, bits):
    """Requests with their adapters, and the tokens of each alone."""
    requests = some_requests(8, SETTINGS, longest=40)
    # Some begin like others, which have another adapter.
    shared = list(range(30, 62))
    requests = [
        replace(r, prompt=[*shared, *r.prompt] if index % 2 else r.prompt)
        for index, r in enumerate(requests)
    ]
    names = [None, *ADAPTERS]
    requests = [
        replace(r, adapter=names[i // 2 % 4], max_tokens=max(3, r.max_tokens))
        for i, r in enumerate(requests)
    ]
    tokens = []
    for request in requests:
        model = base(family, bits=bits)
        if request.adapter:
            adapted(model, request.adapter)
        tokens += alone(model, [replace(request, adapter=None)])
    return requests, tokens


def served(family, bits=None, **options):
    model = base(family, bits=bits)
    # 40 tokens at once: experts sort from 32 on, and do not in the reference.
    engine = Engine(model, prefill_step_size=40, **options)
    for name in ADAPTERS:
        engine.adapters.add(name, adapted(base(family, bits=bits), name))
    return engine


def fresh(requests):
    """The same requests, which an engine has not seen."""
    return [replace(request) for request in requests]


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("llama", None),
        ("gemma3_text", 4),
        *(
            pytest.param(family, bits, marks=pytest.mark.slow)
            for family in FAMILIES
            for bits in (None, 4)
            if (family, bits) not in {("llama", None), ("gemma3_text", 4)}
        ),
    ],
)
def test_a_request_gets_the_tokens_of_its_adapter_alone(family, bits):
    requests, tokens = expected(family, bits)
    # Negative control: the adapters matter.
    others = [replace(request, adapter=None) for request in requests]
    assert run(served(family, bits), others) != tokens
    for seed, cache in ((1, None), (2, PrefixCache(1 << 30))):
        engine = served(family, bits, prefix_cache=cache)
        assert run(engine, fresh(requests), seed=seed) == tokens
    # The prefixes are there now, by adapter.
    assert run(engine, fresh(requests), seed=3) == tokens
    assert set(cache.roots) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in MIXTURES)],
)
def test_drafts_do_not_change_the_tokens(family):
    requests, tokens = expected(family, None)
    make_proposer = draft_model_proposer(base(family))
    engine = served(
        family,
        make_proposer=make_proposer,
        draft_length=DraftLengthController(fixed=3),
        prefix_cache=PrefixCache(1 << 30),
    )
    for seed in (1, 2):
        assert run(engine, fresh(requests), seed=seed) == tokens
    assert engine.stats.rounds > 0


def test_adapters_come_and_go_while_requests_run():
    requests, tokens = expected("llama", None)
    engine = served("llama", prefix_cache=PrefixCache(1 << 30))
    adapters = engine.adapters
    mine = [r for r in requests if r.adapter == "wide"]
    right = [t for r, t in zip(requests, tokens, strict=True) if r in mine]
    assert run(engine, fresh(mine)) == right
    running = fresh(mine)[0]
    engine.add_request(running)
    engine.step()
    with pytest.raises(UserError, match="requests are running"):
        engine.remove_adapter("wide")
    # Another one comes and goes beside it.
    adapters.add("other", adapted(base("llama"), "deep", seed=9))
    engine.remove_adapter("other")
    engine.abort(running)
    cached = engine.prefixes
    before = cached.nbytes
    engine.remove_adapter("wide")
    assert cached.nbytes < before
    with pytest.raises(UserError, match="no adapter 'wide'"):
        engine.add_request(fresh(mine)[0])
    # The same name with other weights: nothing of the first is left.
    adapters.add("wide", adapted(base("llama"), "wide", seed=5))
    other = run(engine, fresh(mine))
    reference = adapted(base("llama"), "wide", seed=5)
    assert other == alone(reference, [replace(r, adapter=None) for r in mine])
    assert other != right


def mixed_logits(model, names, steps, prompt_length=40):
    """Logits of all steps [rows, tokens], in a batch with an adapter by row."""
    numbers = [multi_lora.multi_lora(model).number(name) for name in names]
    rows = None
    for number in numbers:
        state = CacheState(model)
        state.adapter = number
        # Experts are sorted from 64 indices on: here two of 40 tokens.
        state.forward(prompt(prompt_length))
        if rows is None:
            rows = CacheBatch(state)
        else:
            rows.join(state)
    # First one token of a row, which are not sorted.
    logits = [rows.forward(steps[:, :1]), rows.forward(steps[:, 1:])]
    return mx.concatenate(logits, axis=1)


def prompt(length):
    return mx.random.randint(1, VOCABULARY, (1, length), key=mx.random.key(3))


def own_logits(family, bits, name, step):
    """Logits of a row, by the model with its adapter alone."""
    model = base(family, bits=bits)
    if name:
        adapted(model, name)
    state = CacheState(model)
    state.forward(prompt(40))
    return state.forward(step[None])


@pytest.mark.parametrize(
    ("family", "bits"),
    [*zip(MIXTURES, (None, 4, "mxfp4"), strict=True), ("qwen3_moe", 4)],
)
def test_rows_have_experts_with_their_adapter(family, bits, monkeypatch):
    names = ["deep", None, "wide", "deep", "narrow"]
    steps = mx.random.randint(1, VOCABULARY, (5, 20), key=mx.random.key(4))
    pairs = list(zip(names, steps, strict=True))
    right = mx.concatenate([own_logits(family, bits, *pair) for pair in pairs])
    model = served(family, bits).model
    sorted_calls, gather_mm = [], mx.gather_mm

    def recording(*args, rhs_indices, sorted_indices):
        # Updates too.
        assert sorted_indices == (rhs_indices.size >= 64)
        if sorted_indices:
            sorted_calls.append(rhs_indices)
        options = {"rhs_indices": rhs_indices, "sorted_indices": sorted_indices}
        return gather_mm(*args, **options)

    monkeypatch.setattr(mx, "gather_mm", recording)
    got = mixed_logits(model, names, steps)
    assert mx.allclose(got, right, rtol=1e-4, atol=1e-4)
    # What is said to be sorted is, which not every device needs.
    assert sorted_calls
    assert all((i[1:] >= i[:-1]).all() for i in sorted_calls)
    # Negative control: rows of others.
    assert not mx.allclose(mixed_logits(model, names[::-1], steps), right, atol=0.01)


def test_adapters_of_mlx_lm_have_experts():
    """Those that a server loads. Only one layer of a group has an adapter."""

    def own():
        model = base("qwen3_moe", bits=4)
        lora = {"rank": 4, "scale": 2.0, "dropout": 0.0}
        lora["keys"] = ["mlp.switch_mlp.gate_proj"]
        linear_to_lora_layers(model, 1, lora)
        layer = model.layers[1].mlp.switch_mlp.gate_proj
        layer.lora_a = mx.random.normal(layer.lora_a.shape, key=mx.random.key(1))
        layer.lora_b = mx.random.normal(layer.lora_b.shape, key=mx.random.key(2))
        return model

    model = served("qwen3_moe", 4).model
    steps = mx.random.randint(1, VOCABULARY, (2, 20), key=mx.random.key(4))
    others = mixed_logits(model, [None, None], steps)
    multi_lora.multi_lora(model).add("new", own())
    got = mixed_logits(model, ["new", None], steps)
    right = mixed_logits(own(), [None], steps[:1])
    assert mx.allclose(got[:1], right, rtol=1e-4, atol=1e-4)
    assert mx.allclose(got[1:], others[1:], rtol=1e-4, atol=1e-4)
    assert not mx.allclose(others[:1], right, atol=0.01)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_of_the_base_are_computed_as_without_adapters(family, monkeypatch):
    """Bit for bit, and without a product more."""
    calls, gather_mm = [], mx.gather_mm

    def counting(*args, **options):
        calls.append(args)
        return gather_mm(*args, **options)

    monkeypatch.setattr(mx, "gather_mm", counting)
    right, served_model = base(family)(prompt(40)), served(family).model
    count = len(calls)
    assert mx.array_equal(served_model(prompt(40)), right)
    assert len(calls) == 2 * count > 0


def test_experts_of_a_removed_adapter_are_freed():
    engine = served("qwen3_moe")
    experts = [
        m for m in engine.model.modules() if isinstance(m, layers.MultiLoRAExperts)
    ]

    def nbytes():
        return sum(e.adapters.a.nbytes + e.adapters.b.nbytes for e in experts)

    steps = mx.random.randint(1, VOCABULARY, (2, 20), key=mx.random.key(4))
    names, before = ["deep", None], nbytes()
    right = mixed_logits(engine.model, names, steps)
    # Of the highest rank: the others lose their zeros too.
    engine.remove_adapter("wide")
    assert nbytes() < before / 2
    assert mx.allclose(mixed_logits(engine.model, names, steps), right, atol=1e-5)
    engine.remove_adapter("deep")
    engine.remove_adapter("narrow")
    assert {e.adapters.a is e.adapters.b is None for e in experts} == {True}
    assert not any(e.adapters.ranks or e.adapters.chosen for e in experts)


def test_a_removed_adapter_is_freed():
    engine = served("llama")
    linear = [
        m for m in engine.model.modules() if isinstance(m, layers.MultiLoRALinear)
    ]
    assert {len(layer.adapters.weights) for layer in linear} <= {1, 2, 3}
    run(engine, fresh(expected("llama", None)[0]))
    for name in ADAPTERS:
        engine.remove_adapter(name)
    assert not any(layer.adapters.weights or layer.adapters.joined for layer in linear)


def test_the_base_is_computed_as_without_adapters():
    """Bit for bit, and without a product more."""
    tokens = mx.array([[3, 1, 4, 1, 5]])
    engine = served("llama")
    assert mx.array_equal(engine.model(tokens), base("llama")(tokens)).item()


def unusual_experts():
    model = adapted(base("qwen3_moe"), "deep")
    group = model.layers[0].mlp.switch_mlp
    group.__class__ = type("Other", (type(group),), {})
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: adapted(base("llama"), "wide", adapter_type="dora"), "has DoRA"),
        (lambda: adapted(base("llama"), "wide", inside=False), "outside the blocks"),
        (unusual_experts, "has experts in a Other"),
        (lambda: base("llama"), "no low-rank adapter"),
    ],
)
def test_other_adapters_are_refused(make, words):
    adapters = served("llama").adapters
    with pytest.raises(UserError, match=words):
        adapters.add("new", make())
    assert "new" not in adapters.numbers


def test_names_are_unique_and_shared_by_the_engines_of_a_model():
    engine = served("llama")
    with pytest.raises(UserError, match="already"):
        engine.adapters.add("wide", adapted(base("llama"), "wide"))
    other = Engine(engine.model)
    request = GenerationRequest([3, 1, 4], 5, adapter="wide")
    reference = adapted(base("llama"), "wide")
    assert run(other, [request]) == alone(reference, [GenerationRequest([3, 1, 4], 5)])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_infinite_values_stay_in_their_row(family):
    """A mask, not a product with zero."""
    model = base(family)
    engine = Engine(model)
    broken = adapted(base(family), "wide")
    for layer in lora_model.adapted_layers(broken).values():
        layer.lora_a = mx.full(layer.lora_a.shape, mx.inf)
    adapters = engine.adapters
    adapters.add("broken", broken)
    adapters.add("deep", adapted(base(family), "deep"))
    deep, own, bad = (
        GenerationRequest([3, 1, 4], 9, adapter=name)
        for name in ("deep", None, "broken")
    )
    tokens = {deep: [], own: [], bad: []}
    for request in tokens:
        engine.add_request(request)
    while not engine.idle:
        for output in engine.step():
            tokens[output.request].append(output.error or output.token)
    assert isinstance(tokens[bad][-1], UserError)
    for request, reference in (
        (deep, adapted(base(family), "deep")),
        (own, base(family)),
    ):
        right = alone(reference, [GenerationRequest([3, 1, 4], 9)])[0]
        assert tokens[request] == right
