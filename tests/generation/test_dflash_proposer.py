"""Generation with a DFlash drafter: lossless for every kind of cache and request."""

import copy
from functools import cache
from typing import ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling
from lmx.generation.speculative import proposer
from lmx.generation.speculative.dflash import DFlashProposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from tiny_dflash import random_drafter, random_target, trained_drafter
from tiny_families import VOCABULARY
from tiny_generators import byte_tokenizer
from tiny_requests import LONG, PROMPT, speculative, tokens_of

# The matrix of families, caches and proposers: test_engine_equality.py.
FAMILIES = ["llama", "qwen3_next"]
STEPS = 100


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


def test_rejected_draft_tokens_do_not_change_the_text():
    model, plain, drafter = case("gemma3")
    generator = with_drafter(model, Disturbed(drafter), 4)
    assert tokens_of(generator) == plain
    assert 0.1 < generator.speculative_stats.acceptance_rate < 0.9


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prefix_cache_keeps_hidden_states(family):
    model, plain, drafter = case(family)
    prefixes, caches = PrefixCache(1 << 30), []
    generator = with_drafter(model, drafter, 4, prefix_cache=prefixes)
    assert tokens_of(generator, max_tokens=9) == plain[:9]

    def make_proposer(cache):
        caches.append((cache.length, cache.recorded.start, cache.recorded.end))
        return DFlashProposer(drafter, cache)

    generator = speculative(model, make_proposer, 4, prefix_cache=prefixes)
    prompt = [*PROMPT, *plain[:9]]
    assert tokens_of(generator, prompt, max_tokens=LONG - 9) == plain[9:]
    [(length, start, end)] = caches
    assert (start, end) == (0, length)
    assert length >= len(PROMPT)
    assert generator.speculative_stats.accepted_length > 2


def test_hidden_states_of_a_prefix_are_read_once():
    model, plain, drafter = case()
    state, prefixes = CacheState(model), PrefixCache(1 << 30)
    state.record_hidden_states(drafter.layer_ids)
    prompt = [*PROMPT, *plain[:8]]
    state.forward(mx.array([prompt]))
    prefixes.insert(prompt, state)
    context = [*prompt, plain[8]]
    loaded, _ = prefixes.fetch(context, lambda: CacheState(model))
    Recorder.reads.clear()
    proposer = DFlashProposer(Recorder(drafter), loaded)
    sampler = Sampler(Sampling(), context, VOCABULARY)
    draft = proposer.propose(context, 4, sampler)
    assert draft.tolist() == plain[9:13]
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
    index = NGramIndex()
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
    sampler = Sampler(sampling or Sampling(), prompt, VOCABULARY)
    return proposer.propose(prompt, count, sampler)


def test_long_prompts_are_read_in_pieces(monkeypatch):
    model, plain, drafter = case()
    prompt = PROMPT + plain[:20]
    monkeypatch.setattr(proposer, "STEP_SIZE", 5)
    Recorder.reads.clear()
    draft = draft_after(model, Recorder(drafter), prompt, 4)
    assert draft.tolist() == plain[20:24]
    assert [count for _, count in Recorder.reads] == [5, 5, 5, 5, 5, 3]


def test_a_round_has_at_most_the_draft_tokens_of_a_block():
    model, _, drafter = case()
    prompt = PROMPT * 2
    block = draft_after(model, drafter, prompt, 4).tolist()
    for count, expected in (0, []), (1, block[:1]), (3, block[:3]), (9, block):
        assert draft_after(model, drafter, prompt, count).tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_tokens_are_sampled_as_the_target_samples(temperature):
    """With the noise of the request; penalties depend on the draft tokens before."""
    model, _, drafter = case()
    sampling = Sampling(temperature, presence_penalty=3.0, seed=5)
    slots = []

    class Seen(Changed):
        def target_logits(self, logits):
            slots.append(self.drafter.target_logits(logits))
            return slots[-1]

    draft = draft_after(model, Seen(drafter), PROMPT, 4, sampling)
    sampler = Sampler(sampling, PROMPT, VOCABULARY)
    counts = sampler.counts_along(draft)[:4]
    positions = range(len(PROMPT), len(PROMPT) + 4)
    assert sampler.sample(slots[0], positions, counts).tolist() == draft.tolist()
    assert len(set(draft.tolist())) == 4
    # The control: without the penalties of the draft tokens, with other noise.
    first = mx.repeat(counts[:1], 4, axis=0)
    before = sampler.process(slots[0], first)
    assert not mx.allclose(sampler.process(slots[0], counts), before, atol=1e-2)
    plain = tokens_of(Generator(model, byte_tokenizer()), sampling=sampling)
    assert tokens_of(with_drafter(model, drafter, 4), sampling=sampling) == plain
