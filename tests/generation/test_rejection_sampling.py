"""The rules of verification keep the target's distribution; wrong ones are seen.

The joint distribution of the first three tokens over a vocabulary of 8, of 20,000
answers, against the law it must have, by chi-square at a limit that a right rule passes
but once in 1e9 times.
"""

import itertools
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from lmx.generation.sampling import Sampling, filter_logits
from lmx.generation.speculative.decoder import rejection_sample
from lmx.generation.speculative.proposer import DraftTokens

WORDS, SAMPLES, LENGTH = 8, 20000, 3
SETTINGS = {
    "cold": Sampling(temperature=0.7),
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.3),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k": Sampling(temperature=1.0, top_k=4),
    "min_p": Sampling(temperature=1.2, min_p=0.15),
}


def laws(sampling):
    """Target and draft: logits [8, 8, 8, 8, 8] behind four tokens, most of them alike.

    Behind fewer tokens the rest of the index is 0.
    """
    draw = np.random.default_rng(0)
    target = 1.5 * draw.normal(size=(WORDS,) * 5)
    draft = 0.6 * target + 0.9 * draw.normal(size=target.shape)
    return tuple(
        filter_logits(mx.array(x.astype(np.float32)), sampling) for x in (target, draft)
    )


def behind(law, tokens, number):
    """Logits [S, V] behind the first `number` of tokens [S, n]."""
    index = [
        tokens[:, n] if n < number else mx.zeros(len(tokens), mx.int32)
        for n in range(4)
    ]
    return law[tuple(index)]


def guesses(draft, count, key, greedy=False):
    """Tokens [S, k] and what they were drawn from [S, k, V]."""
    tokens, logits = mx.zeros((SAMPLES, 0), mx.int32), []
    for number, now in enumerate(mx.random.split(key, count)):
        law = behind(draft, tokens, number)
        one = mx.argmax(law, axis=-1) if greedy else mx.random.categorical(law, key=now)
        tokens = mx.concatenate([tokens, one.astype(mx.int32)[:, None]], axis=1)
        logits.append(law)
    return tokens, mx.stack(logits, axis=1)


def answers(rule, sampling, count, *, greedy=False, seed=0):
    """The first three tokens [S, 3] of as many rounds as that takes, and what stood."""
    target, draft = laws(sampling)
    keys = mx.random.split(mx.random.key(seed), 3)
    tokens, drawn_from = guesses(draft, count, keys[0], greedy)
    logits = mx.stack([behind(target, tokens, n) for n in range(count + 1)], axis=1)

    def judge(logits, tokens, drawn_from, key):
        return rule(logits, DraftTokens(tokens, None if greedy else drawn_from), key)

    many = mx.vmap(judge)
    stood, token = many(logits, tokens, drawn_from, mx.random.split(keys[1], SAMPLES))
    stood, said = np.array(stood), np.array(tokens)
    said = np.concatenate([said, np.zeros((SAMPLES, LENGTH), int)], axis=1)
    said[np.arange(SAMPLES), stood] = np.array(token)
    for place, now in enumerate(mx.random.split(keys[2], LENGTH)):
        # What the round did not reach the target says itself.
        law = behind(target, mx.array(said.astype(np.int32)), place)
        drawn = np.array(mx.random.categorical(law, key=now))
        said[:, place] = np.where(place > stood, drawn, said[:, place])
    return said[:, :LENGTH], stood


def excess(said, sampling):
    """Chi-square as a multiple of the value that chance exceeds once in 1e9 times."""
    target = laws(sampling)[0]
    expected = np.ones((WORDS,) * LENGTH)
    for tokens in itertools.product(range(WORDS), repeat=LENGTH):
        for place in range(LENGTH):
            law = behind(target, mx.array([tokens], mx.int32), place)
            expected[tokens] *= mx.softmax(law[0]).tolist()[tokens[place]]
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(said.T), 1)
    expected *= SAMPLES
    assert not counts[expected == 0].any(), "said what was filtered out"
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees, z = len(expected) - 1, 5.998
    part = 2 / (9 * degrees)
    return chi_square / (degrees * (1 - part + z * math.sqrt(part)) ** 3)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_sampling_keeps_distribution(name, count):
    said, _ = answers(rejection_sample, SETTINGS[name], count)
    assert excess(said, SETTINGS[name]) < 1


def test_rejection_sampling_keeps_distribution_for_greedy_drafts():
    said, stood = answers(rejection_sample, SETTINGS["plain"], 2, greedy=True)
    assert excess(said, SETTINGS["plain"]) < 1
    assert stood.mean() > 0.1


def raw_ratio(logits, proposal, key):
    """Judges by what the guesses were drawn from before it was filtered."""
    wider = replace(proposal, logits=0.3 * mx.maximum(proposal.logits, -20.0))
    return rejection_sample(logits, wider, key)


def value_dependent(logits, proposal, key):
    """Drops a guess that its own draft thinks unlikely, and draws anew."""
    q = mx.softmax(proposal.logits, axis=-1)
    q = mx.take_along_axis(q, proposal.tokens[:, None], axis=-1)[:, 0]
    stood, token = rejection_sample(logits, proposal, key)
    sure = mx.cumprod((q > 0.3).astype(mx.int32)).sum()
    again = mx.random.categorical(logits[sure], key=mx.random.split(key, 3)[2])
    return mx.minimum(stood, sure), mx.where(sure < stood, again, token)


def no_residual(logits, proposal, key):
    """Behind a guess that falls, draws from the target and not from what is left."""
    stood, _ = rejection_sample(logits, proposal, key)
    return stood, mx.random.categorical(logits[stood], key=mx.random.split(key, 3)[2])


def bonus_of_the_draft(logits, proposal, key):
    """Behind guesses that all stand, draws from the draft."""
    last = proposal.logits[-1:]
    return rejection_sample(mx.concatenate([logits[:-1], last]), proposal, key)


@pytest.mark.parametrize(
    "wrong", [raw_ratio, value_dependent, no_residual, bonus_of_the_draft]
)
def test_chi_square_detects_wrong_acceptance_rules(wrong):
    said, _ = answers(wrong, SETTINGS["plain"], 1)
    assert excess(said, SETTINGS["plain"]) > 1.5


def test_acceptance_rate_matches_theory():
    """Of one guess: sum min(p, q)."""
    sampling = SETTINGS["plain"]
    p, q = (np.array(mx.softmax(law[0, 0, 0, 0])) for law in laws(sampling))
    expected = np.minimum(p, q).sum()
    _, stood = answers(rejection_sample, sampling, 1)
    error = math.sqrt(expected * (1 - expected) / SAMPLES)
    assert abs(stood.mean() - expected) < 4 * error


def test_equal_distributions_are_always_accepted():
    logits = mx.log(mx.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]))
    for seed in range(50):
        tokens = mx.array([seed % 3], mx.int32)
        proposal = DraftTokens(tokens, logits[:1])
        stood, _ = rejection_sample(logits, proposal, mx.random.key(seed))
        assert stood.item() == 1


def test_small_probabilities_are_not_zero():
    """In 16 bits 1e-9 would be none, and the ratio of two of them no number."""
    logits = mx.log(mx.array([[1e-9, 1.0], [0.5, 0.5]]))
    proposal = DraftTokens(mx.array([0], mx.int32), mx.log(mx.array([[2e-9, 1.0]])))
    keys = mx.random.split(mx.random.key(0), 400)
    stood = [rejection_sample(logits, proposal, key)[0].item() for key in keys]
    assert 0.4 < np.mean(stood) < 0.6
