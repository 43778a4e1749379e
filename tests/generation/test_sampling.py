"""Samples against a float64 reference, and the limits of every filter."""

import math

import mlx.core as mx
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.generation.sampler import Sampler
from lmx.generation.sampling import Sampling, filter_logits

LOGITS = np.array([2.0, 1.4, 1.1, 0.9, 0.2, -0.3, -1.0, -2.5, -4.0, 0.7])
NUM_SAMPLES = 40_000
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}
CRITICAL |= {7: 24.32, 8: 26.12, 9: 27.88}  # chi-square, p = 0.001


def reference(logits, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """The distribution in float64, by the definitions of the filters."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    keep = p >= min_p * p.max()
    if top_k:
        keep &= p >= np.sort(p)[-top_k]
    if top_p < 1:
        above = np.array([p[p > x].sum() for x in p])
        keep &= above < top_p
    p = np.where(keep, p ** (1 / temperature), 0)
    return p / p.sum()


def chi_square(samples, expected):
    """The statistic over all possible tokens, and its critical value."""
    counts = np.bincount(samples, minlength=len(expected))
    possible = expected > 0
    assert counts[~possible].sum() == 0
    means = len(samples) * expected[possible]
    degrees_of_freedom = possible.sum() - 1
    return ((counts[possible] - means) ** 2 / means).sum(), CRITICAL[degrees_of_freedom]


def sample(seed=0, **settings):
    sampler = Sampler(Sampling(seed=seed, **settings), [0], len(LOGITS))
    logits = mx.broadcast_to(mx.array(LOGITS, mx.float32), (NUM_SAMPLES, len(LOGITS)))
    return np.array(sampler.sample(logits, range(NUM_SAMPLES)))


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampler_matches_reference_distribution(settings):
    statistic, critical = chi_square(sample(**settings), reference(LOGITS, **settings))
    assert statistic < critical


def test_chi_square_detects_wrong_temperature():
    samples = sample(temperature=1.0)
    statistic, critical = chi_square(samples, reference(LOGITS, temperature=1.05))
    assert statistic > critical


HALVES, UNEQUAL = [0.5, 0.25, 0.125, 0.125], [0.4, 0.3, 0.2, 0.1]
TIES = [math.e**3, math.e**2, math.e**2, math.e**2, math.e]


@pytest.mark.parametrize(
    ("probs", "settings", "kept"),
    [
        # The token that crosses the threshold is kept.
        (HALVES, {"top_p": 0.6}, "1100"),
        (HALVES, {"top_p": 0.4}, "1000"),
        (HALVES, {"top_p": 1e-9}, "1000"),
        (HALVES, {"top_p": 1.0}, "1111"),
        (HALVES[::-1], {"top_p": 0.6}, "0011"),
        # Ties are kept together.
        (TIES, {"top_k": 2}, "11110"),
        (TIES, {"top_k": 1}, "10000"),
        (TIES, {"top_k": 99}, "11111"),
        ([1, 1, 1, 1], {"top_p": 0.1}, "1111"),
        # Relative to the most probable token.
        ([0.6, 0.2, 0.13, 0.07], {"min_p": 0.3}, "1100"),
        ([0.6, 0.2, 0.13, 0.07], {"min_p": 1.0}, "1000"),
        # top_p reads the full distribution: transformers would keep one token, as
        # 0.4 / 0.7 = 0.57 is above 0.5.
        (UNEQUAL, {"top_k": 2, "top_p": 0.5}, "1100"),
        (UNEQUAL[:2], {"top_p": 0.5}, "10"),
    ],
)
def test_filters_keep_tokens(probs, settings, kept):
    logits = mx.array(np.log(probs).astype(np.float32))
    filtered = filter_logits(logits, Sampling(temperature=1.0, **settings))
    assert "".join(str(int(x)) for x in np.isfinite(np.array(filtered))) == kept


def test_filters_match_mlx_lm():
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(32, 500)) * 3, mx.float32)
    theirs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    theirs = apply_top_k(apply_min_p(apply_top_p(theirs, 0.9), 0.02), 40)
    settings = Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02)
    theirs = mx.softmax(theirs / 0.8, axis=-1)
    ours = mx.softmax(filter_logits(logits, settings), axis=-1)
    assert mx.allclose(ours, theirs, atol=1e-6)
    assert (ours > 0).sum(axis=-1).min() > 1


def test_sampler_depends_on_seed_only():
    mx.random.seed(1)
    first = sample(seed=0, temperature=1.0)
    mx.random.seed(2)
    assert (sample(seed=0, temperature=1.0) == first).all()
    assert (sample(seed=1, temperature=1.0) != first).any()


def test_sampler_keeps_global_random_state():
    mx.random.seed(1)
    before = [np.array(s) for s in mx.random.state]
    sample(seed=7, temperature=1.0)
    after = [np.array(s) for s in mx.random.state]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_filter_logits_handles_extreme_values(dtype):
    logits = mx.array([[-1e4, 6e4, 0.0, -mx.inf]]).astype(dtype)
    settings = Sampling(temperature=1e-5, top_p=0.5, top_k=2, min_p=0.9)
    for each in (settings, Sampling()):
        assert Sampler(each, [0], 4).sample(logits, [3]).tolist() == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_sampling_rejects_invalid_values(settings, message):
    with pytest.raises(UserError, match=message):
        Sampling(**settings)
