"""The EAGLE-3 proposer: lossless with every kind of cache, sampler and prefix."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.generator import Generator
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.kv_cache.sequence import CacheState
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling
from lmx.generation.speculative import proposer
from lmx.generation.speculative.eagle3 import Eagle3Proposer
from lmx.generation.speculative.factory import FallbackProposer
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from tiny_eagle3 import DRAFT_VOCABULARY, fitted_drafter, states_of
from tiny_families import VOCABULARY, WINDOW
from tiny_generators import byte_tokenizer
from tiny_requests import PROMPT, sharpened, speculative, tokens_of


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


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_greedy_text_is_that_of_plain_decoding(family):
    """A window and a recurrent state, past several windows."""
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

GREEDY = Sampling()


def proposal(model, drafter, tokens, count, *, pieces=(), sampling=GREEDY):
    """The draft after `tokens`; the proposer also drafted after earlier prefixes."""
    cache = CacheState(model)
    proposer = Eagle3Proposer(drafter, cache)
    for end in (*pieces, len(tokens)):
        cache.forward(mx.array([tokens[cache.length : end - 1]]))
        sampler = Sampler(sampling, tokens[:end], VOCABULARY)
        draft = proposer.propose(tokens[:end], count, sampler)
    return draft


def test_the_draft_is_the_one_of_the_training_forward_pass(
    llama, plain, drafter, monkeypatch
):
    """Also if the proposer catches up over several rounds, and in small pieces."""
    text = PROMPT + plain
    for end in (2, 9, 23):
        draft = proposal(llama, drafter, text[:end], 3).tolist()
        tokens = mx.array([text[:end] + draft])
        states = states_of(llama, tokens, drafter)
        hidden = drafter.draft_hidden(tokens, states, mx.array([[end - 1]]), 3)
        logits = drafter.target_logits(drafter.head(hidden))
        assert mx.argmax(logits, axis=-1).flatten().tolist() == draft
    assert proposal(llama, drafter, text[:23], 3, pieces=(4, 5, 11)).tolist() == (draft)
    monkeypatch.setattr(proposer, "STEP_SIZE", 4)
    assert proposal(llama, drafter, text[:23], 3).tolist() == draft
    # Control: other hidden states give another draft.
    layer_ids, drafter.layer_ids = drafter.layer_ids, (1, 1)
    assert proposal(llama, drafter, text[:23], 3).tolist() != draft
    drafter.layer_ids = layer_ids


def test_a_drafter_drafts_at_most_what_it_was_trained_for(llama, drafter):
    assert drafter.max_draft_tokens == 5
    assert len(proposal(llama, drafter, PROMPT, 9)) == 5
    assert len(proposal(llama, drafter, PROMPT, 2)) == 2
    assert len(proposal(llama, drafter, PROMPT, 0)) == 0


def test_a_draft_has_the_noise_of_the_request(llama, drafter):
    """Sampled as the target samples: from the drafter's logits, with its settings."""
    drafts = []
    for seed in (0, 1):
        sampling = Sampling(temperature=0.7, top_k=9, seed=seed)
        draft = proposal(llama, drafter, PROMPT, 4, sampling=sampling).tolist()
        text = mx.array([PROMPT + draft])
        hidden = drafter.draft_hidden(
            text, states_of(llama, text, drafter), mx.array([[len(PROMPT) - 1]]), 4
        )
        logits = drafter.target_logits(drafter.head(hidden)).reshape(4, -1)
        sampler = Sampler(sampling, PROMPT, VOCABULARY)
        positions = range(len(PROMPT), len(PROMPT) + 4)
        assert sampler.sample(logits, positions).tolist() == draft
        drafts.append(draft)
    assert drafts[0] != drafts[1]


# Prefixes


def test_a_prefix_cache_with_hidden_states_changes_nothing():
    model = sharpened("qwen3_next")
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
            PromptLookupProposer(NGramIndex()), Counting(drafter, cache)
        ),
        3,
    )
    assert tokens_of(generator) == plain
    # Both proposers were used.
    assert 0 < len(calls) < generator.speculative_stats.rounds
