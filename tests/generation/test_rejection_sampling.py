"""Rejection sampling keeps the target's distribution, and wrong rules are detected.

The joint distribution of the first three tokens over a vocabulary of 8, from 20,000
completions, is compared with the exact one by chi-square. A correct rule exceeds the
limit once in 1e9 times.
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

VOCAB, SAMPLES, LENGTH = 8, 20000, 3
SETTINGS = {
    "cold": Sampling(temperature=0.7),
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.3),
    "top_p": Sampling(temperature=1.0, top_p=0.8),
    "top_k": Sampling(temperature=1.0, top_k=4),
    "min_p": Sampling(temperature=1.2, min_p=0.15),
}


def distributions(sampling):
    """Target and draft: logits [8, 8, 8, 8, 8] after four tokens; both are correlated.

    After fewer tokens the remaining indices are 0.
    """
    draw = np.random.default_rng(0)
    target = 1.5 * draw.normal(size=(VOCAB,) * 5)
    draft = 0.6 * target + 0.9 * draw.normal(size=target.shape)
    return tuple(
        filter_logits(mx.array(x.astype(np.float32)), sampling) for x in (target, draft)
    )


def logits_after(logits_table, tokens, number):
    """Logits [S, V] after the first `number` of tokens [S, n]."""
    index = [
        tokens[:, n] if n < number else mx.zeros(len(tokens), mx.int32)
        for n in range(4)
    ]
    return logits_table[tuple(index)]


def draft_tokens(draft, count, key, greedy=False):
    """Draft tokens [S, k] and the logits they are sampled from [S, k, V]."""
    tokens, logits = mx.zeros((SAMPLES, 0), mx.int32), []
    for number, subkey in enumerate(mx.random.split(key, count)):
        logits_table = logits_after(draft, tokens, number)
        one = (
            mx.argmax(logits_table, axis=-1)
            if greedy
            else mx.random.categorical(logits_table, key=subkey)
        )
        tokens = mx.concatenate([tokens, one.astype(mx.int32)[:, None]], axis=1)
        logits.append(logits_table)
    return tokens, mx.stack(logits, axis=1)


def sample_completions(rule, sampling, count, *, greedy=False, seed=0):
    """The first three tokens [S, 3] of every completion, and the accepted counts."""
    target, draft = distributions(sampling)
    keys = mx.random.split(mx.random.key(seed), 3)
    tokens, draft_logits = draft_tokens(draft, count, keys[0], greedy)
    logits = mx.stack(
        [logits_after(target, tokens, n) for n in range(count + 1)], axis=1
    )

    def verify(logits, tokens, draft_logits, key):
        return rule(logits, DraftTokens(tokens, None if greedy else draft_logits), key)

    many = mx.vmap(verify)
    accepted, token = many(
        logits, tokens, draft_logits, mx.random.split(keys[1], SAMPLES)
    )
    accepted, tokens_so_far = np.array(accepted), np.array(tokens)
    tokens_so_far = np.concatenate(
        [tokens_so_far, np.zeros((SAMPLES, LENGTH), int)], axis=1
    )
    tokens_so_far[np.arange(SAMPLES), accepted] = np.array(token)
    for position, subkey in enumerate(mx.random.split(keys[2], LENGTH)):
        # The target samples the tokens after the round.
        logits_table = logits_after(
            target, mx.array(tokens_so_far.astype(np.int32)), position
        )
        drawn = np.array(mx.random.categorical(logits_table, key=subkey))
        tokens_so_far[:, position] = np.where(
            position > accepted, drawn, tokens_so_far[:, position]
        )
    return tokens_so_far[:, :LENGTH], accepted


def chi_square_ratio(tokens_so_far, sampling):
    """Chi-square relative to the critical value at p = 1e-9."""
    target = distributions(sampling)[0]
    expected = np.ones((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        for position in range(LENGTH):
            logits_table = logits_after(target, mx.array([tokens], mx.int32), position)
            expected[tokens] *= mx.softmax(logits_table[0]).tolist()[tokens[position]]
    return ratio_to_critical_value(tokens_so_far, expected)


def ratio_to_critical_value(completions, probabilities):
    """The same for completions [S, n] and their joint probabilities [V, ...]."""
    counts = np.zeros_like(probabilities)
    np.add.at(counts, tuple(completions.T), 1)
    expected = probabilities * len(completions)
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


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", SETTINGS)
def test_rejection_sampling_keeps_distribution(name, count):
    tokens_so_far, _ = sample_completions(rejection_sample, SETTINGS[name], count)
    assert chi_square_ratio(tokens_so_far, SETTINGS[name]) < 1


def test_rejection_sampling_keeps_distribution_for_greedy_drafts():
    tokens_so_far, accepted = sample_completions(
        rejection_sample, SETTINGS["plain"], 2, greedy=True
    )
    assert chi_square_ratio(tokens_so_far, SETTINGS["plain"]) < 1
    assert accepted.mean() > 0.1


def raw_ratio(logits, draft, key):
    """Wrong: uses the draft distribution before filtering."""
    wider = replace(draft, logits=0.3 * mx.maximum(draft.logits, -20.0))
    return rejection_sample(logits, wider, key)


def value_dependent(logits, draft, key):
    """Wrong: rejects draft tokens that are unlikely under the draft."""
    q = mx.softmax(draft.logits, axis=-1)
    q = mx.take_along_axis(q, draft.tokens[:, None], axis=-1)[:, 0]
    accepted, token = rejection_sample(logits, draft, key)
    sure = mx.cumprod((q > 0.3).astype(mx.int32)).sum()
    again = mx.random.categorical(logits[sure], key=mx.random.split(key, 3)[2])
    return mx.minimum(accepted, sure), mx.where(sure < accepted, again, token)


def no_residual(logits, draft, key):
    """Wrong: samples from the target instead of the residual after a rejection."""
    accepted, _ = rejection_sample(logits, draft, key)
    return accepted, mx.random.categorical(
        logits[accepted], key=mx.random.split(key, 3)[2]
    )


def bonus_of_the_draft(logits, draft, key):
    """Wrong: samples the token after the last draft token from the draft."""
    last = draft.logits[-1:]
    return rejection_sample(mx.concatenate([logits[:-1], last]), draft, key)


@pytest.mark.parametrize(
    "rule", [raw_ratio, value_dependent, no_residual, bonus_of_the_draft]
)
def test_chi_square_detects_wrong_acceptance_rules(rule):
    tokens_so_far, _ = sample_completions(rule, SETTINGS["plain"], 1)
    assert chi_square_ratio(tokens_so_far, SETTINGS["plain"]) > 1.5


def test_acceptance_rate_matches_theory():
    """The acceptance rate of one draft token is sum min(p, q)."""
    sampling = SETTINGS["plain"]
    p, q = (
        np.array(mx.softmax(logits_table[0, 0, 0, 0]))
        for logits_table in distributions(sampling)
    )
    expected = np.minimum(p, q).sum()
    _, accepted = sample_completions(rejection_sample, sampling, 1)
    error = math.sqrt(expected * (1 - expected) / SAMPLES)
    assert abs(accepted.mean() - expected) < 4 * error


def test_equal_distributions_are_always_accepted():
    logits = mx.log(mx.array([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]))
    for seed in range(50):
        tokens = mx.array([seed % 3], mx.int32)
        draft = DraftTokens(tokens, logits[:1])
        accepted, _ = rejection_sample(logits, draft, mx.random.key(seed))
        assert accepted.item() == 1


def test_small_probabilities_are_not_zero():
    """In 16 bits 1e-9 would be 0, and the ratio of two of them NaN."""
    logits = mx.log(mx.array([[1e-9, 1.0], [0.5, 0.5]]))
    draft = DraftTokens(mx.array([0], mx.int32), mx.log(mx.array([[2e-9, 1.0]])))
    keys = mx.random.split(mx.random.key(0), 400)
    accepted = [rejection_sample(logits, draft, key)[0].item() for key in keys]
    assert 0.4 < np.mean(accepted) < 0.6
