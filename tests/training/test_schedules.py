"""Learning rate schedules, weight decay and gradient clipping."""

import itertools
import math

import mlx.core as mx
import pytest
from lmx.training.schedules import clip_grad_norm, decay_weights, learning_rate_at

SCHEDULES = ("cosine", "linear", "constant", "warmup-stable-decay")


def rates(schedule, *, steps=100, warmup=0.1, final=0.1, decay_ratio=0.2):
    return [
        learning_rate_at(
            step,
            steps,
            peak=2.0,
            schedule=schedule,
            warmup_ratio=warmup,
            min_lr_ratio=final,
            decay_ratio=decay_ratio,
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear(schedule):
    result = rates(schedule)
    assert result[0] == pytest.approx(0.2)
    assert result[4] == pytest.approx(1.0)
    assert result[9] == result[10] == pytest.approx(2.0)
    assert max(result) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("schedule", "middle", "last"),
    [("cosine", 1.1, 0.2), ("linear", 1.1, 0.2), ("constant", 2.0, 2.0)],
)
def test_schedules_end_at_min_lr(schedule, middle, last):
    # The decay covers steps 10 to 100 of 101, so its middle is step 55.
    result = rates(schedule, steps=101, warmup=10 / 101)
    assert result[55] == pytest.approx(middle)
    assert result[-1] == pytest.approx(last)
    assert result[10:] == sorted(result[10:], reverse=True)


def test_cosine_schedule():
    result = rates("cosine", steps=101, warmup=0.0, final=0.0)
    assert result[25] == pytest.approx(1 + math.cos(math.pi / 4))


def test_warmup_stable_decay_schedule():
    result = rates("warmup-stable-decay", warmup=0.1, final=0.1, decay_ratio=0.4)
    assert result[10:60] == [2.0] * 50
    assert result[79] == pytest.approx(1.1)
    assert result[-1] == pytest.approx(0.2)
    falls = [a - b for a, b in itertools.pairwise(result[59:])]
    assert falls == pytest.approx([1.8 / 40] * 40)


@pytest.mark.parametrize(("share", "peak_steps"), [(0.0, 90), (1.0, 1)])
def test_warmup_stable_decay_with_extreme_ratios(share, peak_steps):
    result = rates("warmup-stable-decay", decay_ratio=share)
    assert result.count(2.0) == peak_steps
    assert result[-1] == pytest.approx(0.2)


def test_schedules_of_few_steps_are_positive():
    for schedule, warmup, steps in itertools.product(
        SCHEDULES, (0.0, 0.5, 1.0), (1, 2, 3)
    ):
        assert all(0 < r <= 2 for r in rates(schedule, steps=steps, warmup=warmup))


def test_weight_decay_skips_vectors():
    parameters = {"w": mx.ones((2, 2)), "norm": mx.ones(2)}
    decayed = decay_weights(parameters, mx.array(0.5), 0.1)
    assert decayed["w"].tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert decayed["norm"].tolist() == [1.0, 1.0]
    assert decay_weights(parameters, mx.array(0.5), 0.0) is parameters


@pytest.mark.parametrize(
    ("limit", "expected"), [(1.0, [0.6, 0.8]), (None, [3.0, 4.0]), (5.1, [3.0, 4.0])]
)
def test_clip_grad_norm_limits_the_joint_norm(limit, expected):
    gradients = {"a": mx.array([[3.0]]), "b": mx.array([4.0])}
    clipped = clip_grad_norm(gradients, mx.array(5.0), limit)
    values = [clipped["a"].item(), clipped["b"].item()]
    assert values == pytest.approx(expected, rel=1e-5 if limit == 1.0 else 0)
