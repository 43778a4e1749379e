"""The engine: requests come, wait, run, end, fail and are dropped; none starves."""

from dataclasses import replace

import mlx.core as mx
import pytest
from lmx.generation import scheduler
from lmx.generation.engine import Engine
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.rotation import CALIBRATION_TOKENS
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import (
    DraftModelBatch,
    DraftModelProposer,
    draft_model_proposer,
)
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.generation.speculative.proposer import (
    NO_DRAFT,
    DraftRequest,
    Proposer,
    propose,
)
from lmx.models.loader import build_model
from tiny_families import changed, config
from tiny_generators import tiny
from tiny_requests import (
    PROMPT,
    Recorder,
    alone,
    noisy,
    run,
    sharpened,
    some_requests,
    speculative,
)

pytestmark = pytest.mark.fused

SETTINGS = [Sampling(), Sampling(temperature=1.0, seed=3)]
FIXED = DraftLengthController(fixed=3)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def rounds(engine):
    """The outputs of every step."""
    while not engine.idle:
        yield engine.step()


def request(*prompt, max_tokens=9, **options):
    return GenerationRequest(list(prompt), max_tokens, **options)


def lookup(_):
    return PromptLookupProposer(NGramIndex())


def test_a_step_is_launched_before_the_one_before_is_read(llama):
    model = Recorder(llama)
    engine = Engine(model)
    engine.add_request(request(1, max_tokens=3))
    assert engine.step() == []
    assert len(engine.step()) == 1
    assert model.shapes == [(1, 1)] * 2
    assert sum(map(len, rounds(engine))) == 2
    assert model.shapes == [(1, 1)] * 3  # no step after the last token


def test_prompts_are_prefilled_in_chunks_while_others_decode(llama):
    model = Recorder(llama)
    engine = Engine(model, max_batch_size=4, prefill_step_size=8)
    short, long = request(1, 2, max_tokens=40), request(*[1] * 200, max_tokens=2)
    late = request(3, max_tokens=3)
    for each in (short, long, late):
        engine.add_request(each)
    order = [output.request for outputs in rounds(engine) for output in outputs]
    # The short request gets a token at every step while the long prompt is prefilled.
    assert order[: order.index(long)].count(short) >= 20
    assert order.index(late) > order.index(long)
    assert [order.count(each) for each in (short, long, late)] == [40, 2, 3]
    assert max(width for _, width in model.shapes) == 8


def test_a_step_prefills_several_short_prompts(llama):
    engine = Engine(llama, max_batch_size=8, prefill_step_size=16)
    for number in range(8):
        engine.add_request(request(*[number + 1] * 5))
    engine.step()
    # Four tokens of each are prefilled; a fifth prompt finds no budget.
    assert len(engine.step()) == 4


def test_requests_start_in_order_and_by_priority(llama):
    engine = Engine(llama, max_batch_size=2)
    numbers = [0, 0, 0, 1, -1, 0, -1]
    requests = [request(n + 1, max_tokens=4, priority=p) for n, p in enumerate(numbers)]
    for each in requests:
        engine.add_request(each)
    firsts = []
    for outputs in rounds(engine):
        assert len({output.request for output in outputs}) <= 2
        firsts += [o.request for o in outputs if o.request not in firsts]
    assert [requests.index(each) for each in firsts] == [4, 6, 0, 1, 2, 5, 3]


def test_the_request_with_the_highest_rank_is_preempted(llama, monkeypatch):
    monkeypatch.setattr(scheduler, "HEADROOM", 4)
    monkeypatch.setattr(scheduler, "MIN_HEADROOM", 1)
    requests = [request(n + 1, max_tokens=24, priority=n % 2) for n in range(3)]
    per_token = sum(Engine(llama).new_cache().bytes_by_capacity().values())
    engine = Engine(llama, kv_memory=int(30 * per_token))
    for each in requests:
        engine.add_request(each)
    while not engine.preemptions:
        engine.step()
    assert [s.request for s in engine.scheduler.waiting] == [requests[1]]


def test_equal_prompts_are_prefilled_once(llama):
    model, prompt = Recorder(llama), list(range(1, 30))
    requests = [
        GenerationRequest(prompt, 5, Sampling(1.0, seed=seed)) for seed in range(4)
    ]
    expected = alone(llama, requests)
    engine = Engine(model)
    for each in requests:
        engine.add_request(each)
    got = {each: [] for each in requests}
    for outputs in rounds(engine):
        for output in outputs:
            got[output.request].append(output.token)
    assert list(got.values()) == expected
    # One token is for the shape of the keys and values.
    shapes = [shape for shape in model.shapes if shape != (1, 1)]
    assert shapes == [(1, 28)] + [(4, 1)] * 5


def test_requests_wait_for_memory(llama):
    requests = [request(n + 1, max_tokens=10) for n in range(4)]
    engine = Engine(llama)
    per_token = sum(engine.new_cache().bytes_by_capacity().values())
    for tokens, most in (11, 1), (23, 2), (1000, 4):
        engine = Engine(llama, kv_memory=int(tokens * per_token))
        for each in requests:
            engine.add_request(each)
        together = [len({o.request for o in outputs}) for outputs in rounds(engine)]
        assert max(together) == most
        assert sum(together) == 40


def test_a_request_with_an_unknown_token_ends_alone(llama):
    bad = GenerationRequest([1, 2], 5, Sampling(logit_bias=((9999, 1.0),)))
    good = request(1, 2, max_tokens=5)
    engine = Engine(llama)
    engine.add_request(bad)
    engine.add_request(good)
    outputs = [output for outputs in rounds(engine) for output in outputs]
    assert [o.request for o in outputs] == [bad] + [good] * 5
    assert "no token 9999" in outputs[0].error.message


@pytest.mark.parametrize("limits", [(0, 0), (0, 1), (1, 2)])
def test_requests_of_no_or_few_tokens(llama, limits):
    engine = Engine(llama)
    requests = [request(n + 1, max_tokens=limit) for n, limit in enumerate(limits)]
    assert [len(tokens) for tokens in run(engine, requests)] == list(limits)
    assert engine.idle


@pytest.mark.parametrize("make_proposer", [None, lookup])
def test_abort_frees_the_cache_and_changes_no_other_request(llama, make_proposer):
    options = {"make_proposer": make_proposer, "draft_length": FIXED}
    engine = Engine(llama, max_batch_size=4, **options)
    dropped, kept = request(*[1] * 300, max_tokens=99), request(*[2] * 20)
    never_started = request(*[3] * 20)
    for each in (dropped, kept):
        engine.add_request(each)
    outputs = [output for _ in range(4) for output in engine.step()]
    assert {output.request for output in outputs} >= {dropped}
    before = engine.nbytes
    engine.add_request(never_started)
    engine.abort(dropped)
    engine.abort(never_started)
    after = [output for step in rounds(engine) for output in step]
    assert {output.request for output in after} <= {kept}
    tokens = [o.token for o in outputs + after if o.request is kept]
    assert [tokens] == alone(llama, [kept])
    assert before > engine.nbytes == 0
    engine.abort(kept)  # which has ended


def test_the_last_abort_makes_the_engine_idle(llama):
    engine = Engine(llama)
    requests = [request(1), request(*[2] * 600)]
    for each in requests:
        engine.add_request(each)
    engine.step()
    for each in requests:
        assert not engine.idle
        engine.abort(each)
    assert engine.idle
    assert not engine.nbytes
    assert engine.step() == []
    [tokens] = run(engine, [again := request(1)])
    assert [tokens] == alone(llama, [again])


def broken(**changes):
    """A model with one weight that is NaN, as after a diverged training."""
    model = sharpened("llama", **changes)
    model.model.norm.weight[0] = float("nan")
    return model


class Poisoned(Recorder):
    """NaN predictions of the rows whose token is 77."""

    def __call__(self, tokens, cache=None):
        logits = super().__call__(tokens, cache)
        poison = mx.where(tokens == 77, mx.nan, 0.0)[..., None]
        return logits + poison


@pytest.mark.parametrize(
    ("family", "make_proposer"), [("llama", lookup), ("qwen3_next", None)]
)
def test_predictions_that_are_nan_end_one_request(family, make_proposer):
    model = sharpened(family)
    good = [request(5, 9, 5, max_tokens=6), request(3, 5, 3), request(8, 8)]
    bad = [request(4, 77), request(77, 4, 77)]
    expected = alone(model, good)
    for order in (good + bad, bad + good, bad):
        engine = Engine(
            Poisoned(model), make_proposer=make_proposer, draft_length=FIXED
        )
        got = {each: [] for each in order}
        for each in order:
            engine.add_request(each)
        for outputs in rounds(engine):
            for output in outputs:
                got[output.request].append(output.error or output.token)
                assert output.is_last or not output.error
        for each in bad:
            assert ["predictions are NaN" in str(error) for error in got[each]] == [1]
        if good[0] in got:
            assert [got[each] for each in good] == expected
        assert not engine.nbytes


def one_by_one(draft_model):
    return lambda _: DraftModelProposer(DraftModelBatch(draft_model))


@pytest.mark.parametrize(
    ("family", "maker"), [("llama", draft_model_proposer), ("qwen3_next", one_by_one)]
)
def test_requests_go_on_without_a_draft_model_that_predicts_nan(family, maker):
    """All of them if its weights are NaN, else those that it cannot read."""
    model = sharpened(family)
    good = [request(5, 9, 5), request(3, 5, 3, 3), request(8, 8, max_tokens=20)]
    bad = [request(4, 77), request(77, 4, 77)]
    for draft, requests, has_drafts in (
        (broken(), good, False),
        (Poisoned(model), good + bad, True),
        (Poisoned(model), bad, False),
    ):
        engine = Engine(model, make_proposer=maker(draft), draft_length=FIXED)
        with pytest.warns(UserWarning, match="without drafts") as warned:
            got = [run(engine, requests) for _ in range(2)]
        assert got == [alone(model, requests)] * 2
        assert len(warned) == 1
        assert "the draft model's predictions are NaN" in str(warned[0].message)
        assert bool(engine.stats.rounds) == has_drafts
        if has_drafts:  # of the good ones, whose draft is the target
            assert engine.stats.acceptance_rate == 1
        assert not engine.nbytes


class Failing(Recorder):
    """Raises in the middle of a pass: half of the layers have seen the tokens."""

    countdown = 10**9

    def __call__(self, tokens, cache=None):
        self.countdown -= 1
        if self.countdown == 0:
            self.model.model.layers[0](
                self.model.model.embed_tokens(tokens), cache=cache[0]
            )
            raise KeyboardInterrupt
        return super().__call__(tokens, cache)


@pytest.mark.parametrize(
    ("make_proposer", "countdown"), [(None, 1), (lookup, 2), (None, 4), (lookup, 7)]
)
def test_an_engine_goes_on_after_an_exception(llama, make_proposer, countdown):
    model = Failing(llama)
    options = {"make_proposer": make_proposer, "draft_length": FIXED}
    prefixes = PrefixCache(1 << 30)
    engine = Engine(model, prefix_cache=prefixes, **options)
    requests = some_requests(6, SETTINGS, 256)
    expected = alone(llama, requests)
    model.countdown = 10**9
    assert run(engine, requests[:3]) == expected[:3]
    kept = prefixes.nbytes
    model.countdown = countdown
    with pytest.raises(KeyboardInterrupt):
        run(engine, [request(*PROMPT, 1, 2, max_tokens=40), request(*PROMPT)])
    assert engine.idle
    assert not engine.nbytes
    assert prefixes.nbytes >= kept
    assert run(engine, requests) == expected


def test_requests_that_cannot_be_batched_are_decoded_one_by_one():
    from mlx_lm.models.cache import ChunkedKVCache

    model = sharpened("llama", head_dim=32)
    model.make_cache = lambda: [ChunkedKVCache(500) for _ in model.layers]
    requests = some_requests(6, SETTINGS)
    recorded = Recorder(model)
    engine = Engine(recorded)
    assert run(engine, requests) == alone(model, requests)
    assert {rows for rows, _ in recorded.shapes} == {1}


@pytest.mark.parametrize(
    ("kind", "make_proposer"), [("raw", None), ("processed", lookup)]
)
def test_logprobs_are_those_of_a_forward_pass(llama, kind, make_proposer):
    sampling = Sampling(0.7, top_p=0.9, seed=4, presence_penalty=0.4)
    greedy = GenerationRequest([9, 4, 9, 4], 9)
    wanted = GenerationRequest([3, 1, 4, 3, 1], 12, sampling, logprobs=kind)
    plain = GenerationRequest(
        [3, 1, 4], 12, Sampling(1.0), logprobs=kind, top_logprobs=5
    )
    options = {"make_proposer": make_proposer, "draft_length": FIXED}
    engine = Engine(llama, **options)
    for each in (greedy, wanted, plain):
        engine.add_request(each)
    outputs = [output for step in rounds(engine) for output in step]
    for each in (wanted, plain):
        got = [o for o in outputs if o.request is each]
        tokens = [*each.prompt, *(o.token for o in got)]
        logits = llama(mx.array([tokens[:-1]]))[0, len(each.prompt) - 1 :]
        for index, (row, output) in enumerate(zip(logits, got, strict=True)):
            if kind == "processed":
                seen = mx.array(sorted({*tokens[: len(each.prompt) + index]}))
                row[seen] = row[seen] - each.sampling.presence_penalty
                row = row / each.sampling.temperature
                if each.sampling.top_p < 1:
                    ascending = mx.sort(row * each.sampling.temperature)
                    above = mx.cumsum(
                        mx.softmax(ascending), reverse=True, inclusive=False
                    )
                    least = ascending[(above >= 0.9).sum()] / 0.7
                    row = mx.where(row < least, -mx.inf, row)
            row = row - mx.logsumexp(row)
            assert abs(output.logprob - row[output.token].item()) < 1e-4
            top = output.logprobs.top
            assert [i for i, _ in top] == mx.argsort(-row)[: len(top)].tolist()
            assert len(top) == each.top_logprobs
            assert all(abs(row[i].item() - value) < 1e-4 for i, value in top)


def test_every_request_of_an_engine_is_drafted_from_its_start():
    """The last token of the request before, which needs no draft, is no reason."""
    model = sharpened("llama")
    engine = Engine(
        model,
        make_proposer=lambda _: DraftModelProposer(DraftModelBatch(model)),
        draft_length=FIXED,
    )
    for number in range(1, 4):
        run(engine, [request(*PROMPT, number, max_tokens=21)])
        assert engine.stats.accepted == [5 * number] * 3
        assert engine.stats.standard_tokens == number


@pytest.mark.parametrize("period", [2, 3, 5, 7, 12])
def test_a_text_with_a_period_is_tried_at_every_place(llama, period):
    tried = []

    class NoDraft(Proposer):
        def propose(self, context, num_draft_tokens, sampler):
            tried.append(len(context) % period)
            return NO_DRAFT

    engine = Engine(llama, make_proposer=lambda _: NoDraft(), draft_length=FIXED)
    run(engine, [request(1, max_tokens=180)])
    assert set(tried) == {*range(period)}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_go_on_after_a_long_time_without(family):
    """Then more tokens are unread than the rows of a sliding window take at once."""
    model = tiny(family)
    make_proposer = draft_model_proposer(model)
    proposers = [make_proposer(None) for _ in range(2)]
    texts = [[n % 200 for n in range(first, first + 300)] for first in (1, 30)]
    sampler = Sampler(Sampling(), [1], 260)
    for lengths in (10, 20), (13, 250), (280, 253):
        contexts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        together = propose(
            [
                DraftRequest(proposer, context, 3, sampler)
                for proposer, context in zip(proposers, contexts, strict=True)
            ]
        )
        for context, draft in zip(contexts, together, strict=True):
            expected = DraftModelProposer(DraftModelBatch(model)).propose(
                context, 3, sampler
            )
            assert draft.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "gemma3_text"])
def test_all_drafts_of_the_model_itself_are_accepted(family):
    """So its cache, also of recurrent states, is right after every round."""
    mx.random.seed(0)
    model = noisy(build_model(config(family)), 0.05)
    maker = lambda _: DraftModelProposer(DraftModelBatch(model))  # noqa: E731
    generator = speculative(model, maker, 4)
    tokens = generator.generate(PROMPT, max_tokens=99, stop_tokens=()).tokens
    assert generator.speculative_stats.accepted_length > 4.9
    assert len({*tokens}) > 20


def test_an_exception_frees_the_drafts(llama, monkeypatch):
    make_proposer = draft_model_proposer(llama)
    engine = Engine(llama, make_proposer=make_proposer, draft_length=FIXED)
    for number in range(2):
        engine.add_request(request(number + 1, 5, max_tokens=20))
    engine.step()
    shared = engine.scheduler.running[0].proposer.shared
    assert shared._members
    monkeypatch.setattr(engine, "_round", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert not shared._members
    assert engine.idle


def test_kv_bits_are_tried_once():
    """Not for every request: a try runs the model."""
    wide = build_model(changed(config("llama"), {"head_dim": 32}))
    model = Recorder(wide)
    engine = Engine(model, kv_bits=8)
    for number in range(3):
        engine.add_request(request(number + 1, max_tokens=2))
    for _ in rounds(engine):
        pass
    assert model.shapes.count((1, CALIBRATION_TOKENS)) == 1


class Unsliced:
    """Tokens [B, 1] of which only the whole can be read."""

    def __init__(self, array):
        self.tolist = array.tolist


def test_tokens_are_read_whole(llama):
    """A slice of them would be computed after the step that runs in the meantime."""
    engine = Engine(llama)
    for _ in range(3):
        engine.add_request(request(*PROMPT, sampling=SETTINGS[1], logprobs="raw"))
    engine.step()
    sequences, tokens, logprobs, is_nan = engine._in_flight
    whole = replace(logprobs, arrays=tuple(map(Unsliced, logprobs.arrays)))
    engine._in_flight = sequences, Unsliced(tokens), whole, Unsliced(is_nan)
    outputs = engine.step()
    assert len(outputs) == len(sequences) == 3
    assert all(output.logprob < 0 for output in outputs)


def test_outputs_name_drafts_and_cached_tokens(llama):
    """For the usage that a server reports."""
    make_proposer = draft_model_proposer(llama)
    options = {"make_proposer": make_proposer, "draft_length": FIXED}
    cached = Engine(llama, prefix_cache=PrefixCache(), **options)
    prompt = [3, 1, 4, 3, 1, 4, 3, 1, 4]
    outputs = []
    for _ in range(2):
        cached.add_request(GenerationRequest(prompt, 24))
        outputs.append([output for step in rounds(cached) for output in step])
    first, second = outputs
    assert {o.cached_tokens for o in first} == {0}
    assert {o.cached_tokens for o in second} == {len(prompt) - 1}
    assert [o.token for o in first] == [o.token for o in second]
    for completion in outputs:
        # The target adds a token of its own to every round.
        assert 0 < sum(o.is_draft for o in completion) < len(completion)
