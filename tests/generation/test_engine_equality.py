"""A request gets the tokens that it gets alone, whatever runs beside it.

Requests join and leave ragged batches at random steps, with every kind of cache,
proposer, quantized cache, sampling and prefix cache.
"""

from functools import lru_cache, partial, partialmethod
from itertools import cycle

import mlx.core as mx
import pytest
from lmx.generation import scheduler
from lmx.generation.engine import Engine
from lmx.generation.kv_cache import batch as batch_module
from lmx.generation.kv_cache import length_classes
from lmx.generation.kv_cache.batch import batch_error, takes_padding
from lmx.generation.kv_cache.layer_rows import AttentionRows, RecurrentRows
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.dflash import DFlashProposer
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from lmx.generation.speculative.eagle3 import Eagle3Proposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.mtp import MTPProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from tiny_dflash import random_drafter, random_target
from tiny_eagle3 import tiny_drafter
from tiny_families import config, member
from tiny_mtp import tiny_mtp
from tiny_requests import alone, noisy, run, some_requests

pytestmark = pytest.mark.fused

# One family of every kind of cache: full, windows, shared keys, latent, recurrent
# states of four kinds, sinks, chunks, and an index of keys.
FAMILIES = [
    *("llama", "gemma3_text", "gemma4", "gemma3n", "deepseek_v3", "qwen3_next"),
    *("falcon_h1", "mamba2", "gpt_oss", "llama4_text", "recurrent_gemma"),
    "deepseek_v32",
]
WITHOUT_MASK = {"recurrent_gemma"}
"""Padding would enter their states, so drafts are verified one by one."""
SAMPLINGS = {
    "greedy": [Sampling()],
    "sampled": [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_p=0.9, seed=4),
    ],
    "penalties": [
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=0.8, frequency_penalty=0.3, seed=5),
        Sampling(logit_bias=((5, 4.0),), presence_penalty=0.3),
    ],
}
SAMPLINGS["all"] = [each for settings in SAMPLINGS.values() for each in settings]
COUNT = 8


@pytest.fixture(autouse=True)
def _length_classes(monkeypatch):
    """The short requests of these tests are in several classes."""
    monkeypatch.setattr(batch_module, "FREE_POSITIONS", 0)


@lru_cache(maxsize=3)
def model_of(family, draft=False):
    """A model, or one that is close to it, in float32."""
    if family == "mtp":
        return tiny_mtp(scale=0.4)[0]
    model = member(family).eval()
    # Greedy tokens vary, and the two models often agree.
    model = noisy(model, 0.1)
    return noisy(model, 0.02, seed=2) if draft else model


def proposer_maker(name, family, model):
    if name == "draft":
        draft_model = model_of(family, draft=True)
        return lambda _: DraftModelProposer(DraftModelBatch(draft_model))
    if name == "lookup":
        index = NGramIndex()
        return lambda _: PromptLookupProposer(index)
    if name == "mtp":
        head = tiny_mtp(scale=0.4)[1]
        return lambda cache: MTPProposer(head, cache)
    if name == "dflash":
        drafter = random_drafter(model, config(family))
        return lambda cache: DFlashProposer(drafter, cache)
    drafter = tiny_drafter(model)
    if name == "chain":
        lookup = proposer_maker("lookup", family, model)
        return lambda c: FallbackProposer(lookup(c), Eagle3Proposer(drafter, c))
    return lambda cache: Eagle3Proposer(drafter, cache)


@lru_cache(maxsize=32)
def tokens_alone(family, sampling, seed):
    """What all proposers of a family are compared with."""
    requests = some_requests(COUNT, SAMPLINGS[sampling], longest=40, seed=seed)
    return alone(model_of(family), requests)


def differences(
    family,
    proposer=None,
    *,
    model=None,
    sampling="all",
    prefix=False,
    seed=0,
    **options,
):
    """The number of requests with other tokens than alone, and the engine."""
    requests = some_requests(COUNT, SAMPLINGS[sampling], longest=40, seed=seed)
    if model or options:
        expected = alone(model or model_of(family), requests, **options)
    else:
        expected = tokens_alone(family, sampling, seed)
    model = model or model_of(family)
    make_proposer = proposer and proposer_maker(proposer, family, model)
    engine = Engine(
        model,
        max_batch_size=5,
        # Less than the longest prompt, and more than two short ones.
        prefill_step_size=24,
        make_proposer=make_proposer,
        draft_length=DraftLengthController(fixed=3 if proposer else None),
        prefix_cache=PrefixCache(1 << 30) if prefix else None,
        **options,
    )
    count = 0
    for again in range(2 if prefix else 1):
        aborted = [1, 6] if not again else []
        got = run(engine, requests, seed=seed + again, aborted=aborted)
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            # A request that was aborted has the first tokens.
            count += ours != theirs[: len(ours) if index in aborted else None]
        assert engine.idle
        assert not engine.nbytes
    return count, engine


def check(family, proposer=None, **options):
    count, engine = differences(family, proposer, **options)
    assert count == 0
    assert bool(engine.stats.rounds) == bool(proposer)
    if proposer == "draft":
        assert 0.05 < engine.stats.acceptance_rate < 1


@pytest.mark.parametrize(
    ("family", "proposer", "options"),
    [
        ("llama", "draft", {"prefix": True}),
        ("llama", "chain", {}),
        ("gemma3_text", "lookup", {"prefix": True}),
        ("qwen3_next", "draft", {}),
        ("deepseek_v3", "eagle3", {}),
        ("mtp", "mtp", {"prefix": True}),
        ("falcon_h1", "dflash", {"sampling": "sampled"}),
        ("recurrent_gemma", "lookup", {"sampling": "greedy"}),
    ],
)
def test_requests_in_batches_get_their_tokens_alone(family, proposer, options):
    check(family, proposer, **options)


def wide_llama():
    return noisy(random_target("llama", head_dim=32, num_hidden_layers=3)[0], 0.1)


@pytest.mark.parametrize(("kv_bits", "proposer"), [(8, "lookup"), ([3, 16, 4], None)])
def test_quantized_caches_in_batches(kv_bits, proposer):
    options = {"model": wide_llama(), "prefix": True}
    check("llama", proposer, kv_bits=kv_bits, **options)


def test_quantized_windows_in_batches():
    """The requests are longer than the window, and past it."""
    model = noisy(random_target("gemma3_text", head_dim=32)[0], 0.1)
    kinds = {kind.partition(" ")[0] for kind in CacheState(model, kv_bits=4).kinds}
    assert kinds == {"RotatedWindowCache", "RotatedKVCache"}
    check("gemma3_text", "lookup", kv_bits=4, model=model, prefix=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_and_proposer(family):
    assert takes_padding(model_of(family)) == (family not in WITHOUT_MASK)
    # The first run with a prefix cache is a cold one. In three families each proposer
    # meets each kind of sampling.
    kinds = ("greedy", "sampled", "penalties")
    for seed, proposer in enumerate((None, "draft", "lookup")):
        sampling = kinds[(seed + FAMILIES.index(family)) % len(kinds)]
        check(family, proposer, sampling=sampling, prefix=True, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle3", "dflash", "chain"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_every_drafter_on_hidden_states(family, proposer):
    for sampling in ("greedy", "sampled", "penalties"):
        check(family, proposer, sampling=sampling, prefix=True)


@pytest.mark.slow
def test_adaptive_draft_lengths_change_nothing():
    model, draft = model_of("llama"), model_of("llama", draft=True)
    requests = some_requests(40, SAMPLINGS["all"], longest=40)
    expected = alone(model, requests)
    make_proposer = lambda _: DraftModelProposer(DraftModelBatch(draft))  # noqa: E731
    engine = Engine(model, max_batch_size=6, make_proposer=make_proposer)
    for seed in range(3):
        assert run(engine, requests, seed=seed) == expected


@pytest.mark.parametrize(
    ("family", "proposer", "options"),
    [
        ("llama", None, {}),
        ("llama", "draft", {"prefix_cache": PrefixCache(1 << 30)}),
        ("gemma3_text", "lookup", {}),
        ("qwen3_next", None, {"prefix_cache": PrefixCache(1 << 30)}),
        ("mtp", "mtp", {}),
    ],
)
def test_preempted_requests_go_on_with_the_same_tokens(
    family, proposer, options, monkeypatch
):
    """With memory for fewer tokens than the requests need together."""
    monkeypatch.setattr(scheduler, "HEADROOM", 4)
    monkeypatch.setattr(scheduler, "MIN_HEADROOM", 1)
    model = model_of(family)
    requests = [
        GenerationRequest([*range(1, 4 + n)], 24, SAMPLINGS["all"][n]) for n in range(6)
    ]
    engine = Engine(
        model,
        make_proposer=proposer and proposer_maker(proposer, family, model),
        draft_length=DraftLengthController(fixed=3 if proposer else None),
        kv_memory=60 * sum(CacheState(model).bytes_by_capacity().values()),
        **options,
    )
    expected = alone(model, requests)
    # Those that came first are never sent back: so all end.
    assert run(engine, requests) == expected
    assert engine.preemptions > 2


def test_rows_with_and_without_hidden_states():
    """A prefix keeps hidden states, also when the drafter is gone again."""
    model, prompt = model_of("llama"), list(range(1, 30))
    requests = some_requests(5, SAMPLINGS["all"], longest=40)
    same_prompt = [GenerationRequest(prompt, 9, each) for each in SAMPLINGS["sampled"]]
    expected = alone(model, requests + same_prompt)
    eagle3, lookup = (
        proposer_maker(name, "llama", model) for name in ("eagle3", "lookup")
    )
    # The last engine has rows of both kinds in one batch.
    kinds = cycle([eagle3, lookup])
    makers = eagle3, None, eagle3, lambda cache: next(kinds)(cache)
    prefixes = PrefixCache(1 << 30)
    for make_proposer in makers:
        engine = Engine(
            model,
            prefix_cache=prefixes,
            make_proposer=make_proposer,
            draft_length=DraftLengthController(fixed=3),
        )
        assert run(engine, requests + same_prompt) == expected


# Negative controls: errors that the comparison finds.


def late(rows, offset):
    """Wrong: the position of rows of unequal lengths is one too large."""
    right = offset.fget(rows)
    return right + 1 if isinstance(right, mx.array) else right


def without_mask(layer, rows, length, window):
    """Wrong: every row sees what lies behind its end."""
    shape = len(rows.lengths), 1, length, layer._end(rows, length)
    return mx.ones(shape, mx.bool_)


def first_row(rows, *places, make):
    """Wrong: a row that leaves takes the wrong place."""
    make(rows, 0, *places[1:])


@pytest.mark.parametrize(
    ("family", "kind", "name", "wrong"),
    [
        ("llama", AttentionRows, "offset", late),
        ("llama", AttentionRows, "_mask", without_mask),
        ("llama", AttentionRows, "leave", first_row),
        ("gemma3_text", AttentionRows, "_mask", without_mask),
        ("qwen3_next", RecurrentRows, "leave", first_row),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_errors_of_a_cache_are_found(family, kind, name, wrong, monkeypatch):
    # In one length class, rows differ more.
    monkeypatch.setattr(length_classes, "MAX_WASTE", 1.0)
    model = model_of(family)
    batch_error(model)  # kept with the model, from before the error
    right = getattr(kind, name)
    if isinstance(right, property):
        wrong = property(partial(late, offset=right))
    elif wrong is first_row:
        wrong = partialmethod(first_row, make=right)
    monkeypatch.setattr(kind, name, wrong)
    count, _ = differences(family)
    assert count > 0


def test_a_padded_state_is_found(monkeypatch):
    """Wrong: recurrent states take up the padding of shorter drafts."""
    batch_error(model_of("qwen3_next"))
    monkeypatch.setattr(RecurrentRows, "begin", lambda rows, width, counts: None)
    assert differences("qwen3_next", "lookup")[0] > 0
