"""Generation with a DFlash drafter: lossless for every kind of cache and request."""

import copy
from functools import cache
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import (
    PrefixCache,
    load_prompt_cache,
    save_prompt_cache,
)
from lmx.generation.kv_cache.recorded_states import RecordedStates
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling, filter_logits
from lmx.generation.speculative import dflash
from lmx.generation.speculative.decoder import rejection_sample
from lmx.generation.speculative.dflash import DFlashProposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.generation.speculative.proposer import DraftTokens, TargetSampler
from test_rejection_sampling import (
    SETTINGS,
    VOCAB,
    chi_square_ratio,
    distributions,
    logits_after,
    ratio_to_critical_value,
)
from test_speculative_decoder import LONG, PROMPT, speculative, tokens_of
from tiny_dflash import random_drafter, random_target, trained_drafter
from tiny_families import VOCABULARY
from tiny_generators import byte_tokenizer

FAMILIES = ["llama", "qwen3", "gemma3", "qwen3_next"]
STEPS, SAMPLES = 100, 2000


@cache
def case(family="llama"):
    """A target, its greedy completion, and a drafter that was trained on it."""
    changes = {"num_hidden_layers": 3} if family == "llama" else {}
    model, config = random_target(family, **changes)
    plain = tokens_of(Generator(model, byte_tokenizer()))
    return model, plain, trained_drafter(model, config, [PROMPT + plain], STEPS)


class Changed:
    """A drafter with other methods in some places."""

    def __init__(self, drafter):
        self.drafter = drafter

    def __getattr__(self, name):
        return getattr(self.drafter, name)


class Disturbed(Changed):
    """The third draft token is wrong, and in some rounds all are."""

    rounds = 0

    def head(self, hidden):
        self.rounds += 1
        logits = self.drafter.head(hidden)
        wrong = (mx.arange(len(hidden)) == 2) | (self.rounds % 4 == 0)
        return mx.where(wrong[:, None], -logits, logits)


def with_drafter(model, drafter, length=None, **options):
    return speculative(model, lambda c: DFlashProposer(drafter, c), length, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_plain_decoding(family):
    model, plain, drafter = case(family)
    assert len(set(plain)) > 5
    # The block has four draft tokens.
    for length, accepted_length in (1, 1.7), (8, 2.0):
        generator = with_drafter(model, drafter, length)
        assert tokens_of(generator) == plain, length
        stats = generator.speculative_stats
        assert stats.accepted_length >= accepted_length
        assert len(stats.proposed) == min(4, length)
    # The number of draft tokens adapts.
    assert tokens_of(with_drafter(model, drafter)) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_draft_tokens_do_not_change_the_text(family):
    model, plain, drafter = case(family)
    generator = with_drafter(model, Disturbed(drafter), 4)
    assert tokens_of(generator) == plain
    assert 0.1 < generator.speculative_stats.acceptance_rate < 0.9


@pytest.mark.slow
def test_greedy_text_of_200_prompts_equals_plain_decoding():
    model, _, drafter = case("llama")
    plain = Generator(model, byte_tokenizer())
    generator = with_drafter(model, drafter, 4)
    rng, rates = np.random.default_rng(0), set()
    for _ in range(200):
        prompt = rng.integers(1, VOCABULARY, rng.integers(1, 20)).tolist()
        expected = tokens_of(plain, prompt, max_tokens=16)
        assert tokens_of(generator, prompt, max_tokens=16) == expected
        rates.add(generator.speculative_stats.acceptance_rate)
    assert len(rates) > 3


def test_text_of_a_quantized_target_equals_plain_decoding():
    model, config = random_target("llama", intermediate_size=64)
    nn.quantize(model, group_size=32, bits=4)
    drafter = random_drafter(model, config)
    plain = tokens_of(Generator(model, byte_tokenizer(), keep_dequantized=False))
    generator = with_drafter(model, drafter, 4, keep_dequantized=False)
    assert tokens_of(generator) == plain


def test_planted_errors_cost_accepted_length(monkeypatch):
    """The text is correct with all of them, so only the accepted length shows them."""
    model, plain, drafter = case()

    def accepted_length(drafter):
        generator = with_drafter(model, drafter, 4)
        assert tokens_of(generator) == plain
        return generator.speculative_stats.accepted_length

    correct = accepted_length(drafter)
    # The states of the next block in place of those of every block.
    other_layers = copy.copy(drafter)
    other_layers.layer_ids = (1, 2)
    assert accepted_length(other_layers) < 0.7 * correct

    # The slot of the anchor in place of the first draft token.
    def from_the_anchor(self, hidden, count):
        return self.norm(hidden[:, :, :count])

    monkeypatch.setattr(type(drafter), "_outputs", from_the_anchor)
    assert accepted_length(drafter) < 0.7 * correct


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_the_prefix_cache_keeps_hidden_states(family):
    model, plain, drafter = case(family)
    prefixes, caches = PrefixCache(1 << 30), []
    generator = with_drafter(model, drafter, 4, prefix_cache=prefixes)
    assert tokens_of(generator, max_tokens=9) == plain[:9]

    def make_proposer(cache):
        caches.append((cache.length, cache.recorded.start, cache.recorded.end))
        return DFlashProposer(drafter, cache)

    generator.make_proposer = make_proposer
    prompt = [*PROMPT, *plain[:9]]
    assert tokens_of(generator, prompt, max_tokens=LONG - 9) == plain[9:]
    [(length, start, end)] = caches
    assert (start, end) == (0, length)
    assert length >= len(PROMPT)
    assert generator.speculative_stats.accepted_length > 2


def test_a_saved_session_keeps_hidden_states(tmp_path):
    model, plain, drafter = case()
    state = CacheState(model)
    state.record_hidden_states(drafter.layer_ids)
    prompt = [*PROMPT, *plain[:8]]
    state.forward(mx.array([prompt]))
    save_prompt_cache(state, tmp_path / "session", digest="x", tokens=prompt)
    loaded = CacheState(model)
    saved = load_prompt_cache(loaded, tmp_path / "session", digest="x")
    assert saved.tokens == prompt
    Recorder.reads.clear()
    proposer = DFlashProposer(Recorder(drafter), loaded)
    context = [*prompt, plain[8]]
    sampler = TargetSampler(Sampling(), context, VOCABULARY)
    draft = proposer.propose(context, 4, sampler)
    assert draft.tokens.tolist() == plain[9:13]
    assert Recorder.reads == [(0, len(prompt))]


def test_a_prefix_without_hidden_states_is_left_out():
    model, plain, drafter = case()
    prefixes = PrefixCache(1 << 30)
    other = Generator(model, byte_tokenizer(), prefix_cache=prefixes)
    assert tokens_of(other, max_tokens=9) == plain[:9]
    generator = with_drafter(model, Recorder(drafter), 4, prefix_cache=prefixes)
    prompt = [*PROMPT, *plain[:9]]
    Recorder.reads.clear()
    assert tokens_of(generator, prompt, max_tokens=12) == plain[9:21]
    assert Recorder.reads[0][0] >= len(PROMPT)


class Recorder(Changed):
    """Records the start and the number of all hidden states that are read."""

    reads: ClassVar = []

    def extend_context(self, states, start, cache):
        self.reads.append((start, states.shape[1]))
        self.drafter.extend_context(states, start, cache)


def test_fallback_after_lookup_reads_every_position_once():
    model, plain, drafter = case()
    # The lookup has the draft tokens of the first rounds.
    index = NGramIndex(ngram_size=2)
    index.extend(index.add_text(), PROMPT + plain[:12])

    def make_proposer(cache):
        lookup = PromptLookupProposer(index)
        return FallbackProposer(lookup, DFlashProposer(Recorder(drafter), cache))

    Recorder.reads.clear()
    assert tokens_of(speculative(model, make_proposer, 3)) == plain
    starts, counts = zip(*Recorder.reads, strict=True)
    assert list(starts) == np.cumsum([0, *counts[:-1]]).tolist()
    assert len(PROMPT) + 3 < counts[0] < len(plain)


def draft_after(model, drafter, prompt, count, sampling=None):
    state = CacheState(model)
    proposer = DFlashProposer(drafter, state)
    state.forward(mx.array([prompt[:-1]]))
    sampler = TargetSampler(sampling or Sampling(), prompt, VOCABULARY)
    return proposer.propose(prompt, count, sampler)


def test_long_prompts_are_read_in_pieces(monkeypatch):
    model, plain, drafter = case()
    prompt = PROMPT + plain[:20]
    monkeypatch.setattr(dflash, "STEP_SIZE", 5)
    Recorder.reads.clear()
    draft = draft_after(model, Recorder(drafter), prompt, 4)
    assert draft.tokens.tolist() == plain[20:24]
    assert [count for _, count in Recorder.reads] == [5, 5, 5, 5, 5, 3]


def test_a_round_has_at_most_the_draft_tokens_of_a_block():
    model, _, drafter = case()
    prompt = PROMPT * 2
    block = draft_after(model, drafter, prompt, 4).tokens.tolist()
    for count, expected in (0, []), (1, block[:1]), (3, block[:3]), (9, block):
        assert draft_after(model, drafter, prompt, count).tokens.tolist() == expected


def test_penalties_depend_on_the_draft_tokens_before():
    model, _, drafter = case()
    sampling = Sampling(temperature=0.8, presence_penalty=3.0)
    draft = draft_after(model, drafter, PROMPT, 4, sampling)
    plain = Sampling(temperature=1.0)
    logits = draft_after(model, drafter, PROMPT, 4, plain).logits
    sampler = TargetSampler(sampling, PROMPT, VOCABULARY)
    counts = sampler.counts_along(draft.tokens)[:4]
    assert mx.allclose(draft.logits, sampler.process(logits, counts), atol=1e-4)
    # The control: without those of the draft tokens.
    first = mx.repeat(counts[:1], 4, axis=0)
    assert not mx.allclose(draft.logits, sampler.process(logits, first), atol=1e-2)
    for temperature in (0.0, 0.8):
        drafter_of = with_drafter(model, drafter, 4)
        sampling = Sampling(temperature=temperature, presence_penalty=3.0)
        tokens = tokens_of(drafter_of, sampling=sampling)
        if not temperature:
            plain = Generator(model, byte_tokenizer())
            assert tokens == tokens_of(plain, sampling=sampling)


class TwoSlots:
    """A drafter without weights: the logits of both slots are always the same."""

    layer_ids, max_draft_tokens = (0,), 2

    def __init__(self, logits):
        self._logits = logits

    def make_cache(self):
        return []

    def extend_context(self, states, start, cache):
        pass

    def draft_block(self, anchor, position, cache, count):
        return self._logits[:count]

    def head(self, hidden):
        return hidden

    target_logits = head


class OneState:
    """The cache of a text of one token before the anchor."""

    def record_hidden_states(self, layer_ids):
        self.recorded = RecordedStates(layer_ids, 0)
        self.recorded.append(mx.zeros((1, 1, 4)))


@cache
def proposals(name):
    """Draft tokens [N, 2], and the logits [2, 8] that they were sampled from."""
    _, raw = distributions(SETTINGS["plain"])
    slots = TwoSlots(mx.stack([raw[0, 0, 0, 0], raw[3, 0, 0, 0]]))
    proposer = DFlashProposer(slots, OneState(), seed=1)
    sampler = TargetSampler(SETTINGS[name], [0, 0], VOCAB)
    drafts = [proposer.propose([0, 0], 2, sampler) for _ in range(SAMPLES)]
    return mx.stack([draft.tokens for draft in drafts]), drafts[0].logits


def round_tokens(name, rule=lambda logits: logits):
    """The first three tokens [N, 3] of completions that start with one round.

    Args:
        rule: makes the logits that are verified from those that were sampled from.
    """
    target, _ = distributions(SETTINGS[name])
    tokens, draft_logits = proposals(name)
    logits = mx.stack([logits_after(target, tokens, n) for n in range(3)], axis=1)
    keys = mx.random.split(mx.random.key(2), SAMPLES + 1)

    def verify(logits, tokens, key):
        return rejection_sample(logits, DraftTokens(tokens, rule(draft_logits)), key)

    accepted, token = mx.vmap(verify)(logits, tokens, keys[1:])
    accepted, tokens = np.array(accepted), np.pad(np.array(tokens), [(0, 0), (0, 1)])
    tokens[np.arange(SAMPLES), accepted] = np.array(token)
    for position, key in enumerate(mx.random.split(keys[0], 3)):
        # The target samples the tokens after the round.
        logits = logits_after(target, mx.array(tokens), position)
        drawn = np.array(mx.random.categorical(logits, key=key))
        after = position > accepted
        tokens[after, position] = drawn[after]
    return tokens


@pytest.mark.parametrize("name", ["plain", "top_k"])
def test_sampled_draft_tokens_keep_the_distribution(name):
    assert chi_square_ratio(round_tokens(name), SETTINGS[name]) < 1


@pytest.mark.parametrize(
    "rule",
    [
        lambda logits: logits[::-1],  # of the wrong slot
        lambda logits: mx.broadcast_to(logits[:1], logits.shape),  # of the first slot
        lambda logits: 0.3 * logits,  # before the temperature
    ],
    ids=["other slot", "first slot", "raw"],
)
def test_chi_square_detects_wrong_distributions(rule):
    tokens = round_tokens("plain", rule)
    assert chi_square_ratio(tokens, SETTINGS["plain"]) > 1.5


@pytest.mark.slow
def test_sampled_text_of_the_generator_keeps_the_distribution():
    """The first three of four tokens, so that the first round has two draft tokens."""
    model, _, drafter = case()
    options = {"max_tokens": 4, "stop_tokens": ()}
    tokens, rounds = [], 0
    for seed in range(1000):
        generator = speculative(
            model, lambda c, seed=seed: DFlashProposer(drafter, c, seed=seed), 2
        )
        sampling = Sampling(temperature=1.0, top_k=3, seed=seed)
        result = generator.generate(PROMPT, sampling=sampling, **options)
        tokens.append(result.tokens[:3])
        rounds += generator.speculative_stats.rounds
    assert rounds >= 1000
    expected = np.zeros((VOCABULARY,) * 3)
    for first, p in next_tokens(model, ()):
        for second, q in next_tokens(model, (first,)):
            for third, r in next_tokens(model, (first, second)):
                expected[first, second, third] = p * q * r
    assert ratio_to_critical_value(np.array(tokens), expected) < 1
    # The control: a temperature of 2/3.
    colder = expected**1.5 / (expected**1.5).sum()
    assert ratio_to_critical_value(np.array(tokens), colder) > 1.5


def next_tokens(model, tokens):
    """The three most probable tokens after the prompt, with their probabilities."""
    logits = model(mx.array([[*PROMPT, *tokens]]))[:, -1].astype(mx.float32)
    logits = filter_logits(logits, Sampling(temperature=1.0, top_k=3))[0]
    probabilities = np.array(mx.softmax(logits))
    return [
        (token, probabilities[token])
        for token in np.flatnonzero(probabilities).tolist()
    ]
