"""Losses and bounds of drafts, against NumPy in float64 and finite differences."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.draft.losses import DraftLoss, distribution_overlap
from lmx.training.teacher_targets import compress_targets, full_targets

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
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "total_variation": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "adaptive_kl_tv": mixed,
}


def sums(name, logits, target):
    """The loss of every position by itself."""
    mask = mx.ones(logits.shape[:2], mx.bool_)
    tokens = mx.zeros(logits.shape[:2], mx.int32)
    objective = DraftLoss(name)
    target = (*target, mask)
    return [
        objective(
            logits[:, n : n + 1],
            tokens[:, n : n + 1],
            mask[:, n : n + 1],
            *(part[:, n : n + 1] for part in target if part is not None),
        ).item()
        for n in range(logits.shape[1])
    ]


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("name", EXPECTED)
def test_draft_loss_matches_top_k_reference(name, top_k):
    teacher, draft = pair()
    target = compress_targets(mx.array(teacher), top_k)
    found = sums(name, mx.array(draft), target)
    kept = np.array(target.indices)
    p, q = (merged(softmax(logits), kept) for logits in (teacher, draft))
    assert np.allclose(found, EXPECTED[name](p, q)[0], atol=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_draft_loss_is_exact_for_full_targets(name):
    teacher, draft = pair(1)
    found = sums(name, mx.array(draft), full_targets(mx.array(teacher)))
    expected = EXPECTED[name](softmax(teacher), softmax(draft))
    assert np.allclose(found, expected[0], atol=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_draft_loss_gradients_match_finite_differences(name):
    teacher, draft = pair(2, positions=2)
    target = compress_targets(mx.array(teacher), 3)
    kept = np.array(target.indices)
    p = merged(softmax(teacher), kept)
    # The weight of the mix is not differentiated.
    weight = np.exp(-3 * np.minimum(p, merged(softmax(draft), kept)).sum(-1))

    def expected(logits):
        q = merged(softmax(logits), kept)
        if name != "adaptive_kl_tv":
            return EXPECTED[name](p, q).sum()
        return (weight * kl(p, q) + (1 - weight) * np.abs(p - q).sum(-1) / 2).sum()

    tokens, mask = mx.zeros((1, 2), mx.int32), mx.ones((1, 2), mx.bool_)

    def loss(logits):
        return DraftLoss(name)(logits, tokens, mask, *target, mask)

    gradient = np.array(mx.grad(loss)(mx.array(draft)))
    for place in np.ndindex(draft.shape):
        step = np.zeros_like(draft)
        step[place] = 1e-5
        slope = (expected(draft + step) - expected(draft - step)) / 2e-5
        assert gradient[place] == pytest.approx(slope, abs=2e-4)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_overlap_bounds_contain_exact_overlap(top_k):
    teacher, draft = pair(3, positions=200)
    target = compress_targets(mx.array(teacher), top_k)
    least, most = map(np.array, distribution_overlap(mx.array(draft), target))
    exact = np.minimum(softmax(teacher), softmax(draft)).sum(-1)
    assert (least <= exact + 1e-6).all()
    assert (exact <= most + 1e-6).all()
    assert (least < most - 1e-6).any()


def test_draft_loss_sums_trainable_positions_with_cross_entropy():
    teacher, draft = pair(4)
    target = compress_targets(mx.array(teacher), VOCABULARY)
    tokens = mx.array([[0, 1, 2, 3, 4]])
    mask = mx.array([[False, True, True, False, False]])
    objective = DraftLoss("forward_kl", cross_entropy=0.25)
    found = objective(mx.array(draft), tokens, mask, *target, mask)
    p, q = softmax(teacher)[0], softmax(draft)[0]
    expected = sum(0.75 * kl(p[i], q[i]) - 0.25 * np.log(q[i, i]) for i in (1, 2))
    assert found.item() == pytest.approx(expected, abs=1e-5)
