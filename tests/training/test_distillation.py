"""Divergences from targets, compared with float64 sums and finite differences."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from lmx.training.distillation import divergence_sum
from lmx.training.teacher_targets import TeacherTarget, compress_targets, full_targets

VOCABULARY = 50


def logits(seed, *shape, size=3.0):
    return size * mx.random.normal(shape, key=mx.random.key(seed))


def softmax(x, temperature=1.0):
    x = np.array(x).astype(np.float64) / temperature
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def test_top_k_kl_is_a_growing_lower_bound():
    teacher, student = (logits(seed, 4, 6, VOCABULARY) for seed in (0, 1))
    result = [
        divergence_sum(student, compress_targets(teacher, k)).item()
        for k in (1, 5, 20, 49, 50)
    ]
    expected = forward(softmax(teacher), softmax(student)).sum()
    assert result[0] > 0
    assert all(a < b + 1e-4 for a, b in itertools.pairwise(result))
    assert result[-1] == pytest.approx(expected, rel=1e-6)
    assert result[0] < 0.9 * expected


def test_kl_gradient_is_zero_at_the_teacher():
    teacher = logits(0, 2, 3, VOCABULARY)
    target = compress_targets(teacher, 7)
    value, gradient = mx.value_and_grad(divergence_sum)(teacher, target)
    assert value.item() == pytest.approx(0, abs=1e-5)
    assert mx.abs(gradient).max().item() < 1e-6


def test_kl_of_compressed_targets():
    impossible = TeacherTarget(
        mx.array([[[0, 1]]]), mx.array([[[0.0, -mx.inf]]]), mx.array([[-mx.inf]])
    )
    student = mx.array([[[0.0, 0.0]]])
    value, gradient = mx.value_and_grad(divergence_sum)(student, impossible)
    assert value.item() == pytest.approx(np.log(2))
    assert gradient.tolist() == [[[-0.5, 0.5]]]


def forward(p, q):
    return (p * np.log(p / q)).sum(axis=-1)


REFERENCES = {"forward_kl": forward, "reverse_kl": lambda p, q: forward(q, p)}


def outcomes(x, indices, temperature):
    """Float64 probabilities of the top tokens, and of the tail if there is one."""
    probs = softmax(x, temperature)
    if indices is None:
        return probs
    top = np.take_along_axis(probs, np.array(indices), axis=-1)
    tail = 1 - top.sum(axis=-1, keepdims=True)
    return np.concatenate([top, tail], -1) if top.shape != probs.shape else top


@pytest.mark.parametrize(
    ("top_k", "temperature"), [(None, 2.0), (1, 1.0), (2, 2.0), (3, 1.0)]
)
@pytest.mark.parametrize("divergence", REFERENCES)
def test_divergences_and_gradients_equal_float64(divergence, top_k, temperature):
    """Three tokens: the value by definition, the gradient by finite differences."""
    teacher, student = (logits(seed, 2, 3, 3, size=2.0) for seed in (3, 4))
    mask = mx.array([[True, False, True], [True, True, False]])
    target = full_targets(teacher, temperature)
    if top_k:
        target = compress_targets(teacher, top_k, temperature)
    p = outcomes(teacher, target.indices, temperature)

    def expected(x):
        losses = REFERENCES[divergence](p, outcomes(x, target.indices, temperature))
        return (losses * np.array(mask)).sum()

    def loss(x):
        settings = {"divergence": divergence, "temperature": temperature}
        return divergence_sum(x, target, mask, **settings)

    value, gradient = mx.value_and_grad(loss)(student)
    x = np.array(student, np.float64)
    assert value.item() == pytest.approx(expected(x), rel=1e-5, abs=1e-6)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-5
        slope = (expected(x + step) - expected(x - step)) / 2e-5
        assert gradient[place].item() == pytest.approx(slope, abs=2e-6), place


@pytest.mark.parametrize("divergence", REFERENCES)
def test_divergences_are_finite_for_extreme_logits(divergence):
    """A token of probability 0 in the teacher or the student has a finite cost."""
    sure = mx.array([[60.0, 0.0, -60.0, -mx.inf]])
    other = mx.array([[-60.0, 0.0, 60.0, 200.0]])
    for target in (full_targets(sure), *(compress_targets(sure, k) for k in (1, 2, 4))):
        value, gradient = mx.value_and_grad(divergence_sum)(
            other, target, divergence=divergence
        )
        assert np.isfinite(value.item())
        assert value.item() > 0.5
        assert np.isfinite(np.array(gradient)).all()
