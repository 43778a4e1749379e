"""Preference losses and their gradients equal float64 references; controls differ."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TrainConfig
from lmx.training.preference_loss import KTO_METRICS, PAIR_METRICS, PreferenceLoss

GENERATOR = np.random.default_rng(0)
PAIRS, LENGTH = 5, 9
LOGPS = -GENERATOR.exponential(1.5, (2 * PAIRS, LENGTH))
MASK = GENERATOR.random((2 * PAIRS, LENGTH)) < 0.6
MASK[:, -1] = True
REFERENCE = -GENERATOR.exponential(8, 2 * PAIRS)
LABELS = np.repeat([True, False, False, True, True], 2)
LOSSES = {
    "dpo": {"beta": 0.3},
    "conservative dpo": {"type": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    "dpo with sft": {"type": "dpo", "sft_weight": 0.7},
    "ipo": {"beta": 0.2},
    "cpo": {"beta": 0.2, "label_smoothing": 0.2},
    "simpo": {"beta": 2.5, "gamma": 0.8},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6},
}


def make_loss(name: str) -> PreferenceLoss:
    block = {"type": name} | LOSSES[name]
    train = TrainConfig(steps=1, batch_size=1, loss=block)
    return PreferenceLoss(train.loss)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def sums(logps, mask):
    return (logps * mask).sum(1), mask.sum(1)


def reference_loss(config, logps, mask=MASK, reference=REFERENCE, labels=LABELS):
    """The sum over examples, as TRL computes the mean, in float64."""
    total, count = sums(logps, mask)
    mean = total / count
    chosen, rejected = slice(0, None, 2), slice(1, None, 2)
    ratio = total - reference
    if config.type == "kto":
        kl = max(0.0, ratio[rejected].mean())
        sign = np.where(labels[chosen], 1.0, -1.0)
        weight = np.where(
            labels[chosen], config.desirable_weight, config.undesirable_weight
        )
        values = weight * (
            1 - np.exp(log_sigmoid(sign * config.beta * (ratio[chosen] - kl)))
        )
        return values.sum()
    odds = mean - np.log1p(-np.exp(mean))
    values = {
        "dpo": config.beta * ratio,
        "ipo": ratio / count,
        "cpo": config.beta * total,
        "simpo": config.beta * mean,
        "orpo": odds,
    }[config.type]
    margin = values[chosen] - values[rejected]
    if config.type == "ipo":
        losses = (margin - 1 / (2 * config.beta)) ** 2
    elif config.type == "simpo":
        losses = -log_sigmoid(margin - config.gamma)
    elif config.type == "orpo":
        losses = -config.beta * log_sigmoid(margin)
    else:
        smooth = config.label_smoothing
        losses = -(1 - smooth) * log_sigmoid(margin) - smooth * log_sigmoid(-margin)
    return (losses - config.sft_weight * mean[chosen]).sum()


def arguments(logps=LOGPS, mask=MASK, name: str = "dpo"):
    values = [mx.array(logps, mx.float32), mx.array(mask)]
    if name in ("dpo", "conservative dpo", "dpo with sft", "ipo", "kto"):
        values.append(mx.array(REFERENCE, mx.float32))
    if name == "kto":
        values.append(mx.array(LABELS))
    return values


@pytest.mark.parametrize("name", LOSSES)
def test_preference_loss_and_gradient_equal_the_reference(name):
    loss = make_loss(name)
    first, *others = arguments(name=name)
    (value, count, _), gradient = mx.value_and_grad(
        lambda logps: loss.from_log_probs(logps, *others)
    )(first)
    assert value.item() == pytest.approx(reference_loss(loss.config, LOGPS), rel=1e-5)
    assert count.item() == PAIRS
    numeric = np.zeros_like(LOGPS)
    for index in np.ndindex(*LOGPS.shape):
        shift = np.zeros_like(LOGPS)
        shift[index] = 1e-5
        # z of KTO is a constant, as for its gradient in TRL.
        if name == "kto" and index[0] % 2:
            continue
        high, low = (reference_loss(loss.config, LOGPS + s * shift) for s in (1, -1))
        numeric[index] = (high - low) / 2e-5
    np.testing.assert_allclose(np.array(gradient), numeric, atol=2e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("fault", ["swapped", "unmasked", "mean"])
def test_wrong_inputs_change_the_loss(name, fault):
    loss = make_loss(name)
    right = loss.from_log_probs(*arguments(name=name))[0].item()
    logps, mask = LOGPS, MASK
    if fault == "swapped":
        order = np.arange(2 * PAIRS).reshape(-1, 2)[:, ::-1].reshape(-1)
        logps, mask = LOGPS[order], MASK[order]
    elif fault == "unmasked":
        mask = np.ones_like(MASK)
    else:
        logps = LOGPS / MASK.sum(1, keepdims=True)
    wrong = loss.from_log_probs(*arguments(logps, mask, name))[0].item()
    assert abs(wrong - right) > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_that_fill_a_batch_do_not_count(name):
    loss = make_loss(name)
    values = arguments(name=name)
    filled = [mx.pad(v, [(0, 4), *[(0, 0)] * (v.ndim - 1)]) for v in values]
    results = map(lambda each: loss.from_log_probs(*each), (values, filled))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-6)


def test_pair_metrics_are_those_of_trl():
    loss = make_loss("dpo")
    *_, metrics = loss.from_log_probs(*arguments())
    means = dict(zip(PAIR_METRICS, np.array(metrics[0] / metrics[1]), strict=True))
    total, _ = sums(LOGPS, MASK)
    rewards = 0.3 * (total - REFERENCE)
    expected = {
        "rewards/chosen": rewards[::2].mean(),
        "rewards/rejected": rewards[1::2].mean(),
        "rewards/margins": (rewards[::2] - rewards[1::2]).mean(),
        "rewards/accuracies": (rewards[::2] > rewards[1::2]).mean(),
        "logps/chosen": total[::2].mean(),
        "logps/rejected": total[1::2].mean(),
    }
    assert means == pytest.approx(expected, rel=1e-5)


def test_kto_metrics_are_means_by_label():
    loss = make_loss("kto")
    *_, metrics = loss.from_log_probs(*arguments(name="kto"))
    means = dict(zip(KTO_METRICS, np.array(metrics[0] / metrics[1]), strict=True))
    total, _ = sums(LOGPS, MASK)
    rewards = 0.2 * (total - REFERENCE)[::2]
    assert means["rewards/chosen"] == pytest.approx(rewards[LABELS[::2]].mean())
    assert means["rewards/rejected"] == pytest.approx(rewards[~LABELS[::2]].mean())


def test_certain_completions_have_finite_odds():
    loss = make_loss("orpo")
    logps = mx.zeros((2, 4))
    value, gradient = mx.value_and_grad(
        lambda x: loss.from_log_probs(x, mx.ones((2, 4)) > 0)[0]
    )(logps)
    assert np.isfinite(value.item())
    assert np.isfinite(np.array(gradient)).all()
