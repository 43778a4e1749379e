"""Losses and bounds of draft models, against NumPy in float64 and finite differences."""

import mlx.core as mx
import numpy as np
import pytest

from toolkit.draft.law import law, overlap
from toolkit.draft.losses import LOSSES, loss_sum
from toolkit.train.targets import compressed

VOCABULARY = 7


def pair(seed=0, positions=5):
    """Logits of a target and of a draft."""
    random = np.random.default_rng(seed)
    return random.normal(size=(2, 1, positions, VOCABULARY)) * 2


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def merged(law_of, kept):
    """A law [..., V] over `kept` [..., k] and the rest."""
    named = np.take_along_axis(law_of, kept, -1)
    return np.concatenate([named, 1 - named.sum(-1, keepdims=True)], -1)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def mixed(p, q):
    overlap = np.minimum(p, q).sum(-1)
    weight = np.exp(-3 * overlap)
    return weight * kl(p, q) + (1 - weight) * (1 - overlap)


EXPECTED = {
    "forward": kl,
    "reverse": lambda p, q: kl(q, p),
    "jensen_shannon": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "total_variation": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "acceptance": mixed,
}


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_the_named_outcomes(name, top_k):
    teacher, draft = pair()
    target = compressed(mx.array(teacher), top_k)
    found = LOSSES[name](law(mx.array(draft), target), target)
    kept = np.array(target.indices)
    p, q = (merged(softmax(logits), kept) for logits in (teacher, draft))
    assert np.allclose(np.array(found), EXPECTED[name](p, q), atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_with_all_tokens_named_they_are_exact(name):
    teacher, draft = pair(1)
    target = compressed(mx.array(teacher), VOCABULARY)
    found = LOSSES[name](law(mx.array(draft), target), target)
    assert np.allclose(
        np.array(found), EXPECTED[name](softmax(teacher), softmax(draft)), atol=1e-5
    )


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name):
    teacher, draft = pair(2, positions=2)
    target = compressed(mx.array(teacher), 3)
    kept = np.array(target.indices)
    p = merged(softmax(teacher), kept)
    # The weight of the mix is not differentiated.
    weight = np.exp(-3 * np.minimum(p, merged(softmax(draft), kept)).sum(-1))

    def expected(logits):
        q = merged(softmax(logits), kept)
        if name != "acceptance":
            return EXPECTED[name](p, q).sum()
        return (weight * kl(p, q) + (1 - weight) * np.abs(p - q).sum(-1) / 2).sum()

    def loss(logits):
        return LOSSES[name](law(logits, target), target).sum()

    gradient = np.array(mx.grad(loss)(mx.array(draft)))
    for place in np.ndindex(draft.shape):
        step = np.zeros_like(draft)
        step[place] = 1e-5
        slope = (expected(draft + step) - expected(draft - step)) / 2e-5
        assert gradient[place] == pytest.approx(slope, abs=2e-4)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_bounds_hold_the_overlap_of_the_whole_vocabulary(top_k):
    teacher, draft = pair(3, positions=200)
    target = compressed(mx.array(teacher), top_k)
    least, most = map(np.array, overlap(law(mx.array(draft), target), target))
    exact = np.minimum(softmax(teacher), softmax(draft)).sum(-1)
    assert (least <= exact + 1e-6).all()
    assert (exact <= most + 1e-6).all()
    assert (least < most - 1e-6).any()


def test_only_positions_that_count_are_summed_and_mixed_with_the_tokens_said():
    teacher, draft = pair(4)
    target = compressed(mx.array(teacher), VOCABULARY)
    tokens = mx.array([[0, 1, 2, 3, 4]])
    mask = mx.array([[False, True, True, False, False]])
    settings = {"loss": "forward", "eta": 3.0}
    found = loss_sum(
        mx.array(draft), tokens, target, mask, cross_entropy=0.25, **settings
    )
    p, q = softmax(teacher)[0], softmax(draft)[0]
    expected = sum(0.75 * kl(p[i], q[i]) - 0.25 * np.log(q[i, i]) for i in (1, 2))
    assert found.item() == pytest.approx(expected, abs=1e-5)
