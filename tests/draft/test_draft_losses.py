"""Draft losses and acceptance bounds, against float64 NumPy and finite differences."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.draft.losses import DraftLoss, distribution_overlap
from lmx.training.teacher_targets import compress_targets, full_targets

VOCABULARY = 7


def pair(seed=0, positions=5):
    """Logits of a target and of a draft."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, 1, positions, VOCABULARY)) * 2


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def top_k_distribution(probs, top_k_indices):
    """A distribution [..., V] over `top_k` [..., k] and one outcome for all others."""
    named = np.take_along_axis(probs, top_k_indices, -1)
    return np.concatenate([named, 1 - named.sum(-1, keepdims=True)], -1)


def kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def adaptive_kl_tv(p, q):
    overlap = np.minimum(p, q).sum(-1)
    weight = np.exp(-3 * overlap)
    return weight * kl(p, q) + (1 - weight) * (1 - overlap)


def sums(logits, target):
    """The loss of every position alone."""
    mask = mx.ones(logits.shape[:2], mx.bool_)
    tokens = mx.zeros(logits.shape[:2], mx.int32)
    loss_function = DraftLoss()
    return [
        loss_function.from_logits(
            logits[:, n : n + 1],
            tokens[:, n : n + 1],
            mask[:, n : n + 1],
            *(part[:, n : n + 1] for part in target if part is not None),
        ).item()
        for n in range(logits.shape[1])
    ]


@pytest.mark.parametrize("top_k", [2, 4])
def test_draft_loss_matches_top_k_reference(top_k):
    teacher, draft = pair()
    target = compress_targets(mx.array(teacher), top_k)
    losses = sums(mx.array(draft), target)
    top_k_indices = np.array(target.indices)
    p, q = (
        top_k_distribution(softmax(logits), top_k_indices)
        for logits in (teacher, draft)
    )
    assert np.allclose(losses, adaptive_kl_tv(p, q)[0], atol=1e-5)


def test_draft_loss_is_exact_for_full_targets():
    teacher, draft = pair(1)
    losses = sums(mx.array(draft), full_targets(mx.array(teacher)))
    expected = adaptive_kl_tv(softmax(teacher), softmax(draft))
    assert np.allclose(losses, expected[0], atol=1e-5)


def test_draft_loss_gradients_match_finite_differences():
    teacher, draft = pair(2, positions=2)
    target = compress_targets(mx.array(teacher), 3)
    top_k_indices = np.array(target.indices)
    p = top_k_distribution(softmax(teacher), top_k_indices)
    # The mixing weight has no gradient.
    weight = np.exp(
        -3 * np.minimum(p, top_k_distribution(softmax(draft), top_k_indices)).sum(-1)
    )

    def expected(logits):
        q = top_k_distribution(softmax(logits), top_k_indices)
        return (weight * kl(p, q) + (1 - weight) * np.abs(p - q).sum(-1) / 2).sum()

    tokens, mask = mx.zeros((1, 2), mx.int32), mx.ones((1, 2), mx.bool_)

    def loss(logits):
        return DraftLoss().from_logits(logits, tokens, mask, *target)

    gradient = np.array(mx.grad(loss)(mx.array(draft)))
    for index in np.ndindex(draft.shape):
        step = np.zeros_like(draft)
        step[index] = 1e-5
        expected_gradient = (expected(draft + step) - expected(draft - step)) / 2e-5
        assert gradient[index] == pytest.approx(expected_gradient, abs=2e-4)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_overlap_bounds_contain_exact_overlap(top_k):
    teacher, draft = pair(3, positions=200)
    target = compress_targets(mx.array(teacher), top_k)
    lower, upper = map(np.array, distribution_overlap(mx.array(draft), target))
    exact = np.minimum(softmax(teacher), softmax(draft)).sum(-1)
    assert (lower <= exact + 1e-6).all()
    assert (exact <= upper + 1e-6).all()
    assert (lower < upper - 1e-6).any()


def test_draft_loss_sums_trainable_positions_with_cross_entropy():
    teacher, draft = pair(4)
    target = compress_targets(mx.array(teacher), VOCABULARY)
    tokens = mx.array([[0, 1, 2, 3, 4]])
    mask = mx.array([[False, True, True, False, False]])
    loss_function = DraftLoss(cross_entropy=0.25)
    losses = loss_function.from_logits(mx.array(draft), tokens, mask, *target)
    p, q = softmax(teacher)[0], softmax(draft)[0]
    expected = sum(
        0.75 * adaptive_kl_tv(p[i], q[i]) - 0.25 * np.log(q[i, i]) for i in (1, 2)
    )
    assert losses.item() == pytest.approx(expected, abs=1e-5)
