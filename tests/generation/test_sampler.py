"""Samples follow the filtered distribution, whatever runs beside them or drafts them.

Chi-square against exact probabilities. A right sampler exceeds the limit once in 1e9
times.
"""

import itertools
import math
import random

import mlx.core as mx
import numpy as np
import pytest
from lmx.cpu.kernel_cache import kernel_cache
from lmx.generation.engine import Engine
from lmx.generation.sampler import Sampler, noise_keys, sample_rows
from lmx.generation.sampling import Sampling, filter_logits
from lmx.generation.sequence import GenerationRequest
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.draft_model import DraftModelBatch, DraftModelProposer
from tiny_requests import run, sharpened

pytestmark = pytest.mark.fused

VOCAB, SAMPLES = 8, 12_000
SETTINGS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.7),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "cold_top_p": Sampling(temperature=0.7, top_p=0.8),
    "top_k": Sampling(temperature=1.0, top_k=4),
    "min_p": Sampling(temperature=1.2, min_p=0.15),
    "penalty": Sampling(temperature=1.0, presence_penalty=0.7),
}
LOGITS = mx.array(1.5 * np.random.default_rng(0).normal(size=(3, VOCAB)), mx.float32)


def ratio_to_critical_value(drawn, probabilities):
    """Chi-square of samples [S, n] with joint probabilities [V, ...] at p = 1e-9."""
    counts = np.zeros_like(probabilities)
    np.add.at(counts, tuple(drawn.T), 1)
    expected = probabilities * len(drawn)
    assert not counts[expected == 0].any(), "sampled a filtered token"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees, z = len(expected) - 1, 5.998
    part = 2 / (9 * degrees)
    return chi_square / (degrees * (1 - part + z * math.sqrt(part)) ** 3)


def probabilities(logits, sampling):
    return np.array(mx.softmax(filter_logits(logits, sampling), axis=-1), float)


def draws(sampling, *, seeds, positions):
    """Tokens [seeds, positions] for logits that repeat LOGITS along the positions."""
    logits = LOGITS[mx.arange(len(positions)) % len(LOGITS)]
    tokens = []
    for seed in seeds:
        changed = Sampling(**vars(sampling) | {"seed": seed})
        tokens.append(Sampler(changed, [0], VOCAB).sample(logits, positions))
    return np.array(mx.stack(tokens))


def joint(sampling):
    """Probabilities [V, V, V] of independent tokens at three positions."""
    return np.einsum("a,b,c->abc", *probabilities(LOGITS, sampling))


@pytest.mark.parametrize("name", ["plain", "cold", "top_p", "cold_top_p"])
def test_samples_are_independent_over_positions(name):
    sampling = SETTINGS[name]
    tokens = draws(sampling, seeds=[7], positions=range(3 * SAMPLES)).reshape(-1, 3)
    assert ratio_to_critical_value(tokens, joint(sampling)) < 1
    # The control: noise that is used at two positions.
    reused = draws(sampling, seeds=[7], positions=np.arange(3 * SAMPLES) // 3 * 3)
    assert ratio_to_critical_value(reused.reshape(-1, 3), joint(sampling)) > 1.5


def test_samples_are_independent_over_seeds():
    sampling = SETTINGS["plain"]
    tokens = draws(sampling, seeds=range(3000), positions=range(5, 8))
    assert ratio_to_critical_value(tokens, joint(sampling)) < 1
    # Seeds beside each other, at the same position.
    first = probabilities(LOGITS[0], sampling)
    pairs = tokens[:, 0].reshape(-1, 2)
    assert ratio_to_critical_value(pairs, np.outer(first, first)) < 1
    assert ratio_to_critical_value(tokens, joint(SETTINGS["cold"])) > 1.5


def test_noise_of_seeds_and_positions_does_not_repeat():
    """Also where 32 bits overflow, and of seeds that are one apart."""
    places = [0, 1, 1 << 20, (1 << 32) - 1]
    keys = [
        tuple(key)
        for seed in (0, 1, 2, 1 << 32, (1 << 64) - 1)
        for key in noise_keys([Sampler(Sampling(1.0, seed=seed), [0], VOCAB)], [places])
    ]
    assert len(set(keys)) == len(keys)


def test_greedy_samples_need_no_noise():
    tokens = draws(Sampling(), seeds=[0, 1], positions=range(3))
    assert (tokens == np.array(mx.argmax(LOGITS, axis=-1))).all()


@pytest.mark.parametrize("width", [VOCAB - 2, VOCAB + 3])
def test_tokens_that_only_one_model_has_are_not_sampled(width):
    """Rows of an LM head of another size; the largest logits are past the end."""
    logits = mx.broadcast_to(mx.arange(width, dtype=mx.float32), (500, width))
    tokens = Sampler(Sampling(1.0), [0], VOCAB).sample(logits, range(500))
    assert tokens.max().item() == min(width, VOCAB) - 1


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_are_sampled_as_alone(mixed):
    """With drafts of several lengths, and penalties that depend on them."""
    settings = [SETTINGS["plain"], *(SETTINGS.values() if mixed else [])]
    samplers = [
        Sampler(Sampling(**vars(each) | {"seed": seed}), [1, 2], VOCAB)
        for seed, each in enumerate(settings * 2)
    ]
    draw, count = np.random.default_rng(1), len(samplers)
    logits = mx.array(draw.normal(size=(count, 4, VOCAB)), mx.float32)
    drafts = [mx.array(draw.integers(0, VOCAB, 1 + n % 3)) for n in range(count)]
    positions = draw.integers(2, 90, count).tolist()
    pairs = list(zip(samplers, drafts, strict=True))
    counts = [sampler.counts_along(draft) for sampler, draft in pairs]
    together = sample_rows(samplers, logits, positions, counts).tolist()
    for row, (sampler, draft) in enumerate(pairs):
        for index in range(len(draft) + 1):
            assert together[row][index] == (
                sampler.sample(
                    logits[row, index : index + 1],
                    [positions[row] + index],
                    sampler.counts_after(sampler.counts, draft[:index]),
                ).item()
            )


# The joint distribution of three tokens of an engine with a draft model.


class Table:
    """A model that looks up its logits [V, V, V, V] by the last three tokens."""

    layers, args = (), None

    def __init__(self, table):
        self.table = table

    def make_cache(self):
        return [TokenCache()]

    def __call__(self, tokens, cache=None):
        cache = cache or self.make_cache()
        read = mx.array(cache[0].tokens[-2:], mx.int32)
        before = mx.concatenate([mx.zeros(2 - len(read), mx.int32), read])
        text = mx.concatenate([before, tokens[0]])
        cache[0].tokens += tokens[0].tolist()
        cache[0].offset = len(cache[0].tokens)
        return self.table[text[:-2], text[1:-1], text[2:]][None]


class TokenCache:
    """The tokens themselves in place of keys and values."""

    nbytes, state = 0, ()

    def __init__(self):
        self.tokens, self.offset = [], 0

    def update_and_fetch(self):
        """Marks the cache as attention."""

    def trim(self, count):
        del self.tokens[len(self.tokens) - count :]
        self.offset -= count
        return count

    def empty(self):
        return True


def correlated():
    """Tables of a target, and of a draft model that is often wrong."""
    draw = np.random.default_rng(0)
    target = 1.5 * draw.normal(size=(VOCAB,) * 4)
    draft = 0.6 * target + 0.9 * draw.normal(size=target.shape)
    return [Table(mx.array(x.astype(np.float32))) for x in (target, draft)]


def completions(model, draft, sampling, count, **options):
    """The first three tokens [S, 3] of completions of [0], and the engine."""
    engine = Engine(
        model,
        make_proposer=lambda _: DraftModelProposer(DraftModelBatch(draft)),
        draft_length=DraftLengthController(fixed=2),
        **options,
    )
    requests = [
        GenerationRequest([0], 4, Sampling(**vars(sampling) | {"seed": seed}))
        for seed in range(count)
    ]
    return np.array(run(engine, requests))[:, :3], engine


def exact(model, sampling):
    """Joint probabilities [V, V, V] of the first three tokens after [0]."""
    expected = np.zeros((model.vocab,) * 3)
    texts = list(itertools.product(range(model.vocab), repeat=2))
    logits = model.logits_after([[0, *text] for text in texts])
    for text, rows in zip(texts, logits, strict=True):
        counts = Sampler(sampling, [0], model.vocab)
        counts = counts.counts_along(mx.array(text)) if counts.counts.size else None
        sampler = Sampler(sampling, [0], model.vocab)
        filtered = sampler.process(rows, counts)
        first, second, third = np.array(mx.softmax(filtered, axis=-1), float)
        expected[text] = first[text[0]] * second[text[1]] * third
    return expected


class Enumerable:
    """What `exact` needs of a model."""

    def __init__(self, model, vocab):
        self.model, self.vocab = model, vocab

    def logits_after(self, texts):
        if isinstance(self.model, Table):
            return mx.concatenate([self.model(mx.array([text])) for text in texts])
        return self.model(mx.array(texts))


@pytest.mark.parametrize(
    "name", ["plain", pytest.param("top_k", marks=pytest.mark.slow)]
)
def test_drafts_keep_the_distribution(name):
    """One request after the other."""
    (target, draft), count = correlated(), 1500
    tokens, engine = completions(target, draft, SETTINGS[name], count)
    expected, wrong = (
        exact(Enumerable(m, VOCAB), SETTINGS[name]) for m in (target, draft)
    )
    assert ratio_to_critical_value(tokens, expected) < 1
    assert ratio_to_critical_value(tokens, wrong + 1e-9) > 1.5
    assert 0.2 < engine.stats.acceptance_rate < 0.9


@pytest.mark.slow
def test_drafts_in_batches_of_four_keep_the_distribution(monkeypatch):
    """With a penalty, which depends on the tokens before."""
    # Drafts of these models may lose time, and must not rest for it.
    always = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(DraftLengthController, "may_rest", always)
    size = 6
    model = sharpened("llama", vocab_size=size)
    draft = sharpened("llama", seed=1, vocab_size=size)
    sampling = SETTINGS["penalty"]
    tokens, engine = completions(model, draft, sampling, 900, max_batch_size=4)
    assert ratio_to_critical_value(tokens, exact(Enumerable(model, size), sampling)) < 1
    wrong = exact(Enumerable(draft, size), sampling) + 1e-9
    assert ratio_to_critical_value(tokens, wrong) > 1.5
    assert engine.stats.rounds > 900


@pytest.mark.parametrize("name", SETTINGS)
def test_acceptance_is_near_the_overlap_of_the_distributions(name):
    """At least (1 - TV) / (1 + TV), arXiv 2408.07978, and at most 1 - TV."""
    rows = mx.array([[1.0, 0.3, -0.4, 0.1, -2, 0.9, -1, 0]])
    others = rows + mx.array(np.random.default_rng(2).normal(size=VOCAB), mx.float32)
    sampler, count = Sampler(SETTINGS[name], [0], VOCAB), 6000
    tokens, probs = [], []
    for logits in (rows, others):
        logits = mx.broadcast_to(logits, (count, VOCAB))
        counts = mx.repeat(sampler.counts, count, axis=0)
        tokens.append(sampler.sample(logits, range(count), counts))
        probs.append(mx.softmax(sampler.process(logits[:1], counts[:1]))[0])
    distance = 0.5 * mx.abs(probs[0] - probs[1]).sum().item()
    assert 0.1 < distance < 0.9
    equal = (tokens[0] == tokens[1]).astype(mx.float32).mean().item()
    slack = 4 * math.sqrt(0.25 / count)
    assert (1 - distance) / (1 + distance) - slack < equal < 1 - distance + slack


def test_new_settings_compile_nothing():
    """As constants of a kernel, they would be compiled for every new setting."""
    kernels = lambda: len([*kernel_cache().glob("*.so")])  # noqa: E731
    logits, draw = mx.random.normal((4, 60)), random.SystemRandom().uniform

    def sample(*settings):
        samplers = [Sampler(each, [0], 60) for each in settings]
        mx.eval(sample_rows(samplers, logits[:, None], [3] * 4))
        for one, row in zip(samplers, logits, strict=True):
            mx.eval(one.sample(row[None], [3]))

    sample(*[Sampling(1.0)] * 4)
    before = kernels()
    # Of no earlier run: its kernels are kept.
    for top_k in (0, 3, 7, 200):
        sample(*(Sampling(draw(0.5, 2), draw(0.5, 1), top_k) for _ in range(4)))
        rows = [Sampling(draw(0.5, 2), min_p=draw(0.01, 0.2)), Sampling()]
        sample(*rows, Sampling(draw(0.5, 2), top_k=top_k), Sampling(1.0))
    assert kernels() == before
    # The control: a constant is a part of its kernel.
    factor = draw(1, 2)
    mx.eval(mx.compile(lambda x: mx.exp(x * factor) + factor)(logits))
    assert kernels() > before


def test_rows_of_several_settings_are_filtered_as_alone():
    logits = mx.random.normal((len(SETTINGS) + 2, 50), key=mx.random.key(3))
    rows = [*SETTINGS.values(), Sampling(), Sampling(0.9, 0.7, 12, 0.02)]
    together = np.array(mx.softmax(filter_logits(logits, *rows), axis=-1))
    for row, sampling in enumerate(rows):
        alone = mx.softmax(filter_logits(logits[row], sampling), axis=-1)
        np.testing.assert_allclose(together[row], np.array(alone), rtol=1e-6)
    assert len({tuple(row > 0) for row in together}) > 4
