"""The EAGLE-3 proposer: lossless with every kind of cache, sampler and prefix."""

from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampling import Sampling
from lmx.generation.speculative import eagle3
from lmx.generation.speculative.decoder import SpeculativeDecoder
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.eagle3 import Eagle3Proposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.generation.speculative.proposer import DraftTokens, TargetSampler
from test_rejection_sampling import ratio_to_critical_value
from test_speculative_decoder import (
    PROMPT,
    SETTINGS,
    sharpened,
    speculative,
    tokens_of,
)
from tiny_eagle3 import DRAFT_VOCABULARY, fitted_drafter, states_of, tiny_drafter
from tiny_families import VOCABULARY, WINDOW
from tiny_generators import byte_tokenizer


@pytest.fixture(scope="module")
def llama():
    return sharpened("llama")


@pytest.fixture(scope="module")
def plain(llama):
    """The completion of the prompt without drafts."""
    return tokens_of(Generator(llama, byte_tokenizer()))


@pytest.fixture(scope="module")
def drafter(llama, plain):
    return fitted_drafter(llama, PROMPT + plain)


def accepted(generator):
    return sum(generator.speculative_stats.accepted)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_next"])
def test_greedy_text_is_that_of_plain_decoding(family):
    """Full attention, a window, and a recurrent state, past several windows."""
    model = sharpened(family)
    plain = tokens_of(Generator(model, byte_tokenizer()))
    assert len(plain) > 4 * WINDOW
    drafter = fitted_drafter(model, PROMPT + plain)
    for length in (2, 5):
        generator = speculative(model, lambda c: Eagle3Proposer(drafter, c), length)
        assert tokens_of(generator) == plain, length
        assert accepted(generator) >= 5
    stats = generator.speculative_stats
    assert len(stats.proposed) == 5
    assert sum(stats.accepted) < sum(stats.proposed)


def test_the_draft_length_controller_drafts_too(llama, plain, drafter):
    generator = speculative(llama, lambda c: Eagle3Proposer(drafter, c), None)
    for _ in range(2):
        assert tokens_of(generator) == plain


@pytest.mark.slow
def test_greedy_text_of_200_prompts(llama, plain):
    drafter = fitted_drafter(llama, PROMPT + plain, num_layers=2)
    rng, total = np.random.default_rng(5), 0
    for number in range(200):
        prompt = rng.integers(1, VOCABULARY, rng.integers(1, 40)).tolist()
        options = {"prompt": prompt, "max_tokens": 12}
        expected = tokens_of(Generator(llama, byte_tokenizer()), **options)
        generator = speculative(
            llama, lambda c: Eagle3Proposer(drafter, c), 1 + number % 5
        )
        assert tokens_of(generator, **options) == expected, prompt
        total += accepted(generator)
    assert total > 50


@pytest.mark.parametrize("name", SETTINGS)
def test_penalties_and_biases_are_applied_exactly(llama, plain, drafter, name):
    options = {"sampling": SETTINGS[name], "max_tokens": 3 * WINDOW}
    expected = tokens_of(Generator(llama, byte_tokenizer()), **options)
    generator = speculative(llama, lambda c: Eagle3Proposer(drafter, c), 3)
    assert tokens_of(generator, **options) == expected
    assert (expected == plain[: 3 * WINDOW]) == (name == "plain")


def test_allowed_tokens_that_cannot_be_drafted_give_no_draft(llama, drafter):
    draft_ids = np.array(drafter.draft_ids)
    unknown = np.flatnonzero(draft_ids == DRAFT_VOCABULARY)[:6].tolist()
    known = drafter.target_tokens(mx.arange(3)).tolist()
    for temperature in (0.0, 1.0):
        for allowed, rounds in (unknown, 0), (unknown + known, 1):
            sampling = Sampling(temperature, allowed_tokens=tuple(allowed), seed=3)
            generator = speculative(llama, lambda c: Eagle3Proposer(drafter, c), 3)
            tokens = tokens_of(generator, sampling=sampling, max_tokens=9)
            assert set(tokens) <= set(allowed)
            assert (generator.speculative_stats.rounds > 0) == rounds


# The draft itself


def proposal(model, drafter, tokens, count, *, pieces=(), **options):
    """The draft after `tokens`; the proposer also drafted after earlier prefixes."""
    sampling = options.pop("sampling", Sampling())
    cache = CacheState(model)
    proposer = Eagle3Proposer(drafter, cache, **options)
    for end in (*pieces, len(tokens)):
        cache.forward(mx.array([tokens[cache.length : end - 1]]))
        sampler = TargetSampler(sampling, tokens[:end], VOCABULARY)
        draft = proposer.propose(tokens[:end], count, sampler)
    return draft


def test_the_draft_is_the_one_of_the_training_forward_pass(
    llama, plain, drafter, monkeypatch
):
    """Also if the proposer catches up over several rounds, and in small pieces."""
    text = PROMPT + plain
    for end in (2, 9, 23):
        draft = proposal(llama, drafter, text[:end], 3).tokens.tolist()
        tokens = mx.array([text[:end] + draft])
        states = states_of(llama, tokens, drafter)
        hidden = drafter.draft_hidden(tokens, states, mx.array([[end - 1]]), 3)
        logits = drafter.target_logits(drafter.head(hidden))
        assert mx.argmax(logits, axis=-1).flatten().tolist() == draft
    assert proposal(
        llama, drafter, text[:23], 3, pieces=(4, 5, 11)
    ).tokens.tolist() == (draft)
    monkeypatch.setattr(eagle3, "READ_STEP_SIZE", 4)
    assert proposal(llama, drafter, text[:23], 3).tokens.tolist() == draft
    # Control: other hidden states give another draft.
    layer_ids, drafter.layer_ids = drafter.layer_ids, (1, 1)
    assert proposal(llama, drafter, text[:23], 3).tokens.tolist() != draft
    drafter.layer_ids = layer_ids


def test_a_drafter_drafts_at_most_what_it_was_trained_for(llama, drafter):
    assert drafter.max_draft_tokens == 5
    assert len(proposal(llama, drafter, PROMPT, 9)) == 5
    assert len(proposal(llama, drafter, PROMPT, 2)) == 2
    assert len(proposal(llama, drafter, PROMPT, 0)) == 0


def test_the_logits_are_those_that_were_sampled_from(llama, drafter, monkeypatch):
    sampling, seen = Sampling(temperature=0.7, top_k=9), []
    sample = mx.random.categorical

    def categorical(logits, **options):
        seen.append(logits)
        return sample(logits, **options)

    monkeypatch.setattr(mx.random, "categorical", categorical)
    draft = proposal(llama, drafter, PROMPT, 4, sampling=sampling)
    assert mx.array_equal(draft.logits, mx.concatenate(seen))
    assert draft.logits.shape == (4, VOCABULARY)
    assert mx.isfinite(draft.logits).sum(axis=-1).tolist() == [9] * 4
    chosen = mx.take_along_axis(draft.logits, draft.tokens[:, None], axis=-1)
    assert mx.isfinite(chosen).all()
    others = proposal(llama, drafter, PROMPT, 4, sampling=sampling, seed=1)
    assert others.tokens.tolist() != draft.tokens.tolist()
    greedy = proposal(llama, drafter, PROMPT, 4, sampling=sampling, sampled=False)
    assert greedy.logits is None


# Prefixes


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prefix_cache_with_hidden_states_changes_nothing(family):
    model = sharpened(family)
    plain = Generator(model, byte_tokenizer())
    text = PROMPT + tokens_of(plain)
    drafter = fitted_drafter(model, text)
    generator = speculative(
        model,
        lambda c: Eagle3Proposer(drafter, c),
        3,
        prefix_cache=PrefixCache(1 << 30),
    )
    for limit in (1, 2, 5):
        first = tokens_of(generator, max_tokens=limit)
        second = [*PROMPT, *first, 3, 1, 4]
        expected = tokens_of(plain, second, max_tokens=9)
        assert tokens_of(generator, second, max_tokens=9) == expected


def test_a_prefix_without_hidden_states_is_left_unread(llama, plain, drafter):
    prefixes = PrefixCache(1 << 30)
    filler = Generator(llama, byte_tokenizer(), prefix_cache=prefixes)
    assert tokens_of(filler, max_tokens=12) == plain[:12]
    starts = []

    def propose(cache):
        proposer = Eagle3Proposer(drafter, cache)
        starts.append(cache.recorded.start)
        return proposer

    generator = speculative(llama, propose, 3, prefix_cache=prefixes)
    second = [*PROMPT, *plain[:12], 3, 1]
    expected = tokens_of(Generator(llama, byte_tokenizer()), second)
    assert tokens_of(generator, second) == expected
    assert starts[0] >= len(PROMPT)
    assert generator.speculative_stats.rounds > 5


def test_fallback_after_prompt_lookup_catches_up(llama, plain, drafter):
    calls = []

    class Counting(Eagle3Proposer):
        def propose(self, context, count, sampler):
            calls.append(len(context))
            return super().propose(context, count, sampler)

    generator = speculative(
        llama,
        lambda cache: FallbackProposer(
            PromptLookupProposer(NGramIndex(ngram_size=1)), Counting(drafter, cache)
        ),
        3,
    )
    assert tokens_of(generator) == plain
    # Both proposers were used.
    assert 0 < len(calls) < generator.speculative_stats.rounds


# Sampled text: the joint distribution of the second and third tokens, which one round
# drafts.

SMALL, SMALL_DRAFT, SAMPLES = 6, 4, 600
SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "cold_top_k": Sampling(temperature=0.7, top_k=4),
}


@pytest.fixture(scope="module")
def small():
    """A target of six tokens, and a drafter that can draft four of them."""
    model = sharpened("llama", vocab_size=SMALL)
    drafter = tiny_drafter(
        model,
        vocab_size=SMALL,
        counts=np.array([0, 3, 0, 2, 1, 4]),
        draft_vocab_size=SMALL_DRAFT,
        num_draft_tokens=3,
    )
    # Confident, and often wrong.
    drafter.lm_head.weight = 2 * drafter.lm_head.weight
    return model, drafter


def joint_probs(model, sampling):
    """Probabilities [6, 6] of the second and third tokens after the prompt [0]."""
    tokens = np.array(list(product(range(SMALL), repeat=3)))
    logits = model(mx.array(np.pad(tokens, ((0, 0), (1, 0)))))[:, :-1]
    sampler = TargetSampler(sampling, [0], SMALL)
    logits = sampler.process(logits.reshape(-1, SMALL), sampler.counts)
    probs = np.array(mx.softmax(logits, axis=-1), np.float64).reshape(-1, 3, SMALL)
    chosen = np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    return chosen.prod(axis=-1).reshape((SMALL,) * 3).sum(axis=0)


def sampled_ratio(model, proposer, drafter, sampling):
    """Chi-square of sampled text relative to the critical value."""
    completions = np.zeros((SAMPLES, 2), int)
    for seed in range(SAMPLES):
        cache = CacheState(model)
        decoder = SpeculativeDecoder(
            cache,
            proposer(drafter, cache, seed=seed),
            draft_length=DraftLengthController(max_draft_tokens=2, fixed=2),
            sampling=replace(sampling, seed=seed),
        )
        completions[seed] = list(decoder.decode([0], 4))[1:3]
    return ratio_to_critical_value(completions, joint_probs(model, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_text_keeps_the_distribution(small, name):
    model, drafter = small
    assert sampled_ratio(model, Eagle3Proposer, drafter, SAMPLINGS[name]) < 1


class Unscattered(Eagle3Proposer):
    """Wrong: the logits of draft ids stand at the tokens with the same numbers."""

    def propose(self, context, count, sampler):
        draft = super().propose(context, count, sampler)
        ids = self._drafter.target_tokens(mx.arange(SMALL_DRAFT))
        widths = [(0, 0), (0, SMALL - SMALL_DRAFT)]
        logits = mx.pad(draft.logits[:, ids], widths, constant_values=-mx.inf)
        return DraftTokens(draft.tokens, logits)


class Unprocessed(Eagle3Proposer):
    """Wrong: the logits of another temperature than the one that was sampled with."""

    def propose(self, context, count, sampler):
        draft = super().propose(context, count, sampler)
        return DraftTokens(draft.tokens, 0.25 * draft.logits)


class Ids(Eagle3Proposer):
    """Wrong: draft ids in place of tokens."""

    def propose(self, context, count, sampler):
        draft = super().propose(context, count, sampler)
        return DraftTokens(self._drafter.draft_ids[draft.tokens], draft.logits)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [Unscattered, Unprocessed, Ids])
def test_chi_square_detects_wrong_proposers(small, wrong):
    model, drafter = small
    assert sampled_ratio(model, wrong, drafter, SAMPLINGS["plain"]) > 1.5
