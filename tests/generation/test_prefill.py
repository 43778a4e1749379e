"""Short prompts are processed together: in few passes, and as if each were alone."""

import pytest
from lmx.generation import engine as engine_module
from lmx.generation.engine import Engine
from lmx.generation.kv_cache.batch import CacheBatch, padded
from lmx.generation.kv_cache.layer_rows import WINDOW_SLACK
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.prefill import PASS_TOKENS
from lmx.generation.sampling import Sampling
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from test_engine_equality import model_of, proposer_maker, wide_llama
from tiny_families import VOCABULARY
from tiny_requests import Recorder, alone

pytestmark = pytest.mark.fused

LONG = PASS_TOKENS + WINDOW_SLACK
SAMPLINGS = [Sampling(), Sampling(1.0, seed=3), Sampling(repetition_penalty=1.3)]


class PromptRecorder(Recorder):
    """A model that records the shapes of its inputs [B, N], N > 1."""

    def __call__(self, tokens, cache=None):
        logits = super().__call__(tokens, cache=cache)
        if tokens.shape[1] == 1 and cache is not None:
            self.shapes.pop()
        return logits


def request(length, first=1, max_tokens=6, sampling=SAMPLINGS[0]):
    """A prompt that begins unlike those with another first token."""
    prompt = [(first + n * (first + 6)) % (VOCABULARY - 1) + 1 for n in range(length)]
    return GenerationRequest(prompt, max_tokens, sampling)


def requests_of(*lengths):
    return [
        request(length, n + 1, sampling=SAMPLINGS[n % 3])
        for n, length in enumerate(lengths)
    ]


def run(model, requests, **options):
    """Tokens by request, which come together, and the engine."""
    engine = Engine(model, **options)
    tokens = {each: [] for each in requests}
    for each in requests:
        engine.add_request(each)
    while not engine.idle:
        for output in engine.step():
            assert not output.error, output.error
            tokens[output.request].append(output.token)
    return [*tokens.values()], engine


def first_passes(model, requests, **options):
    """The shapes of the first step that are no decoding, and that tokens are equal."""
    recorded = PromptRecorder(model)
    got, _ = run(recorded, requests, **options)
    assert got == alone(model, requests)
    return recorded.shapes


LENGTHS = 12, 30, 3, 21, 9
ONE_PASS = [(5, 29)]


@pytest.mark.parametrize(
    ("family", "proposer", "passes"),
    [
        ("llama", None, ONE_PASS),
        ("llama", "draft", ONE_PASS),
        ("llama", "eagle3", ONE_PASS),
        ("gemma3_text", "lookup", ONE_PASS),
        ("qwen3_next", None, ONE_PASS),
        ("deepseek_v3", "eagle3", ONE_PASS),
        ("falcon_h1", None, ONE_PASS),
        ("mtp", "mtp", ONE_PASS),
        # Padding would enter its states.
        ("recurrent_gemma", None, [(1, n - 1) for n in sorted(LENGTHS, reverse=True)]),
    ],
)
def test_prompts_of_different_lengths(family, proposer, passes):
    model = model_of(family)
    options = {"draft_length": DraftLengthController(fixed=3)}
    if proposer:
        options["make_proposer"] = proposer_maker(proposer, family, model)
    shapes = first_passes(model, requests_of(*LENGTHS), **options)
    assert shapes[: len(passes)] == passes
    assert proposer or shapes == passes


@pytest.mark.parametrize("kv_bits", [8, [3, 16, 4]])
def test_prompts_in_quantized_caches(kv_bits):
    model, requests = PromptRecorder(wide_llama()), requests_of(*LENGTHS)
    got, _ = run(model, requests, kv_bits=kv_bits)
    assert model.shapes[-1:] == ONE_PASS
    assert got == alone(model, requests, kv_bits=kv_bits)


@pytest.mark.parametrize(
    ("lengths", "step_size", "passes"),
    [
        # A row is padded by less than a pass costs.
        ((1 + PASS_TOKENS, 2, 3, 1), 512, [(3, PASS_TOKENS)]),
        ((2 + PASS_TOKENS, 2, 3), 512, [(2, PASS_TOKENS + 1), (1, 1)]),
        # Padding counts: three rows of 8 are more than the budget.
        ((9, 4, 2), 23, [(2, 8)]),
        ((9, 4, 2), 24, [(3, 8)]),
        # A long prompt is cut, but not for a small chunk.
        ((9, 4, 200), 100, [(2, 8), (1, 84), (1, 100), (1, 15)]),
        ((9, 4, 200), 47, [(2, 8), *[(1, 47)] * 4, (1, 11)]),
        # What follows a long prompt waits for its last chunk.
        ((90, 9, 4), 64, [(1, 64), (2, 25), (1, 3)]),
    ],
)
def test_passes_are_worth_their_padding(lengths, step_size, passes):
    model = model_of("llama")
    shapes = first_passes(model, requests_of(*lengths), prefill_step_size=step_size)
    assert shapes == [shape for shape in passes if shape[1] > 1]


def test_windows_take_no_wide_pass():
    """Their ring keeps so many positions beyond the window."""
    model = model_of("gemma3_text")
    lengths = LONG, LONG, WINDOW_SLACK + 2, WINDOW_SLACK + 1, WINDOW_SLACK
    shapes = first_passes(model, requests_of(*lengths))
    assert shapes == [(1, n - 1) for n in lengths[:3]] + [(2, WINDOW_SLACK)]


@pytest.mark.parametrize(
    ("family", "proposer"),
    [("llama", None), ("llama", "eagle3"), ("gemma3_text", None), ("qwen3_next", None)],
)
def test_prefixes_of_different_lengths(family, proposer):
    """Rows of a pass begin at different positions, and all are stored."""
    model = model_of(family)
    options = {"draft_length": DraftLengthController(fixed=3)}
    if proposer:
        options["make_proposer"] = proposer_maker(proposer, family, model)
    prefixes = PrefixCache(1 << 30)
    old = requests_of(40, 70, 50)
    new = [
        GenerationRequest([*each.prompt[:kept], *range(1, 3 + extra)], 6, sampling)
        for each, kept, extra, sampling in zip(
            [*old, old[0]],
            (0, 70, 50, 40),
            (9, 3, 14, 0),
            [*SAMPLINGS] * 2,
            strict=False,
        )
    ]
    got, _ = run(model, old, prefix_cache=prefixes, **options)
    assert got == alone(model, old)
    recorded = PromptRecorder(model)
    got, _ = run(recorded, new, prefix_cache=prefixes, **options)
    assert got == alone(model, new)
    # A snapshot is stored at the end of a prompt only, before its last token.
    has_snapshot = CacheState(model).has_snapshot
    assert recorded.shapes[0] == (4, 16 if has_snapshot else 15)
    for each in (*old, *new):
        assert prefixes.match(each.prompt[:-1]) == len(each.prompt) - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_common_prefix_is_processed_once(family):
    model, shared = model_of(family), request(50).prompt
    requests = [
        GenerationRequest([*shared, *request(5 + n, n + 9).prompt], 6) for n in range(5)
    ]
    options = {"prefix_cache": PrefixCache(1 << 30)}
    shapes = first_passes(model, requests, **options)
    tokens = sum(rows * width for rows, width in shapes)
    # A recurrent state is stored at the end of a prompt: the second one, which finds
    # none, is cut where they differ.
    cut = [(1, 50)] if family == "qwen3_next" else []
    assert shapes == [(1, 54), *cut, (4, 8)]
    assert tokens < 150
    # Less in common than a pass costs is processed again.
    requests = [
        GenerationRequest([*shared[:20], *request(5 + n, n + 9).prompt], 6)
        for n in range(5)
    ]
    options = {"prefix_cache": PrefixCache(1 << 30)}
    assert first_passes(model, requests, **options) == [(5, 28)]


def test_equal_prompts_are_processed_once():
    """Also those that do not follow each other, and those that start later."""
    model, kinds = model_of("llama"), requests_of(9, 14, 9)
    requests = [
        GenerationRequest(list(kinds[n % 3].prompt), 6, Sampling(1.0, seed=n))
        for n in range(9)
    ]
    assert first_passes(model, requests) == [(3, 13)]
    same = [GenerationRequest(list(kinds[0].prompt), 6, each) for each in SAMPLINGS * 2]
    assert first_passes(model, same, max_batch_size=2) == [(1, 8)]


def test_a_group_waits_for_memory():
    """And it fits as a whole: each needs room for its prompt and its tokens."""
    model, requests = model_of("llama"), requests_of(9, 9, 9, 9)
    per_token = sum(CacheState(model).bytes_by_capacity().values())
    shapes = first_passes(model, requests, kv_memory=int(31 * per_token))
    assert max(rows for rows, _ in shapes) == 2
    assert sum(rows for rows, _ in shapes) == 4


def test_a_request_of_a_group_ends_alone():
    """With an error at its start, or dropped after its pass."""
    model, requests = PromptRecorder(model_of("llama")), requests_of(12, 9, 10, 7)
    expected = alone(model.model, requests)
    model.shapes.clear()
    bad = request(8)
    bad.sampling = Sampling(logit_bias=((9999, 1.0),))
    engine = Engine(model)
    tokens = {each: [] for each in (*requests, bad)}
    for each in (*requests[:2], bad, *requests[2:]):
        engine.add_request(each)
    while not engine.idle:
        for output in engine.step():
            tokens[output.request].append(output.error or output.token)
        engine.abort(requests[1])
    assert model.shapes == [(4, 11)]
    [error] = tokens.pop(bad)
    assert "no token 9999" in error.message
    assert tokens.pop(requests[1]) == []
    assert [*tokens.values()] == [expected[0], *expected[2:]]


# Negative controls: errors that the comparison finds.


def as_long_as_the_longest(parts):
    """Wrong: padding counts as tokens."""
    tokens, counts = padded(parts)
    return tokens, [max(counts)] * len(counts)


def of_the_first_row(rows, row, extract=CacheBatch.extract):
    """Wrong: all requests get the state of one."""
    return extract(rows, 0)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (engine_module, "padded", as_long_as_the_longest),
        (CacheBatch, "extract", of_the_first_row),
    ],
)
def test_errors_of_a_pass_are_found(owner, name, wrong, monkeypatch):
    model, requests = model_of("llama"), requests_of(12, 12, 9, 10)
    expected = alone(model, requests)
    monkeypatch.setattr(owner, name, wrong)
    got, _ = run(model, requests)
    assert got != expected
