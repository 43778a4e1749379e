"""GRPO and its variants equal float64 references; controls differ."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TrainConfig
from lmx.training.grpo_loss import MIN_STD, GRPOLoss, group_advantages

GENERATOR = np.random.default_rng(0)
GROUPS, COMPLETIONS, LENGTH, MAX_TOKENS = 2, 3, 9, 12
SIZE = GROUPS * COMPLETIONS
LOGPS = -GENERATOR.exponential(1.0, (SIZE, LENGTH))
OLD = LOGPS + GENERATOR.normal(0, 0.3, LOGPS.shape)
REFERENCE = LOGPS + GENERATOR.normal(0, 0.2, LOGPS.shape)
MASK = GENERATOR.random(LOGPS.shape) < 0.6
MASK[:, -1] = True
REWARDS = GENERATOR.normal(size=SIZE)
# GSPO has one ratio per completion.
TYPES = {name: {"loss_type": name} for name in ("grpo", "dr_grpo", "dapo")} | {
    "gspo": {"importance_sampling_level": "sequence"}
}


def make_loss(name: str, **changes) -> GRPOLoss:
    block = {"type": "grpo", "rewards": ["exact_match"]} | TYPES[name] | changes
    config = TrainConfig(steps=1, batch_size=1, loss=block, rollouts={}).loss
    return GRPOLoss(config, temperature=1.0, max_tokens=MAX_TOKENS)


def reference_advantages(name: str):
    groups = REWARDS.reshape(GROUPS, COMPLETIONS)
    values = groups - groups.mean(axis=1, keepdims=True)
    if name != "dr_grpo":
        values = values / (groups.std(axis=1, ddof=1, keepdims=True) + MIN_STD)
    return values.reshape(-1)


def reference_loss(config, logps, advantages, mask=MASK, total=np.sum):
    """The loss as TRL's GRPOTrainer writes it, in float64; the mean of a batch."""
    low, high = config.epsilon, config.epsilon_high or config.epsilon
    log_ratio = logps - OLD
    if config.importance_sampling_level == "sequence":
        means = [row[m].mean() for row, m in zip(log_ratio, mask, strict=True)]
        log_ratio = np.repeat(np.array(means)[:, None], LENGTH, axis=1)
    ratio = np.exp(log_ratio)
    gains = np.minimum(
        ratio * advantages[:, None],
        np.clip(ratio, 1 - low, 1 + high) * advantages[:, None],
    )
    gap = REFERENCE - logps
    losses = -gains + config.beta * (np.exp(gap) - gap - 1)
    if config.loss_type == "dapo":
        return losses[mask].mean()
    if config.loss_type == "dr_grpo":
        return (losses * mask).sum() / (MAX_TOKENS * SIZE)
    return np.mean([row[m].mean() for row, m in zip(losses, mask, strict=True)])


def value_of(loss: GRPOLoss, logps=LOGPS, mask=MASK, rewards=REWARDS):
    """The mean loss, its gradient and the metrics."""
    scale = loss.config.loss_type != "dr_grpo"
    groups = mx.array(rewards, mx.float32).reshape(GROUPS, COMPLETIONS)
    advantages = group_advantages(groups, scale=scale).reshape(-1)
    others = [mx.array(v, mx.float32) for v in (rewards, OLD, REFERENCE)]

    def mean(logps):
        total, count, metrics = loss.from_log_probs(
            logps, mx.array(mask), advantages, *others
        )
        return total / count, metrics

    (value, metrics), gradient = mx.value_and_grad(mean)(mx.array(logps, mx.float32))
    return value.item(), np.array(gradient), np.array(metrics)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("name", TYPES)
def test_loss_and_gradient_equal_the_reference(name, beta):
    # Wide enough that some tokens are clipped and others are not.
    loss = make_loss(name, beta=beta, epsilon=0.1, epsilon_high=0.15)
    advantages = reference_advantages(name)
    value, gradient, _ = value_of(loss)
    assert value == pytest.approx(
        reference_loss(loss.config, LOGPS, advantages), abs=1e-6
    )
    for row, column in [(0, LENGTH - 1), (1, 2), (3, 5), (5, LENGTH - 1)]:
        step = np.zeros_like(LOGPS)
        step[row, column] = 1e-6
        up, down = (
            reference_loss(loss.config, LOGPS + sign * step, advantages)
            for sign in (1, -1)
        )
        assert gradient[row, column] == pytest.approx((up - down) / 2e-6, abs=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_untrained_tokens_do_not_count(name):
    changed = np.where(MASK, LOGPS, LOGPS - 3)
    value, gradient, _ = value_of(make_loss(name, beta=0.1))
    assert value_of(make_loss(name, beta=0.1), changed)[0] == pytest.approx(value)
    assert not gradient[~MASK].any()
    # The control: with a mask of everything the prompt does count.
    everything = np.ones_like(MASK)
    assert value_of(make_loss(name, beta=0.1), mask=everything)[0] != pytest.approx(
        value, rel=1e-3
    )


def test_higher_reward_raises_the_log_probability():
    rewards = np.array([1.0, 0, 0, 0, 0, 1.0])
    loss = make_loss("grpo", epsilon=0.9, epsilon_high=9.0)
    _, gradient, _ = value_of(loss, rewards=rewards)
    assert (gradient[rewards == 1][MASK[rewards == 1]] < 0).all()
    assert (gradient[rewards == 0][MASK[rewards == 0]] > 0).all()


def test_metrics():
    loss = make_loss("grpo", beta=0.1, epsilon=0.1, epsilon_high=0.1)
    _, _, (sums, counts) = value_of(loss)
    means = dict(zip(loss.metric_names, sums / counts, strict=True))
    assert means["reward"] == pytest.approx(REWARDS.mean(), abs=1e-6)
    assert means["completion_tokens"] == pytest.approx(MASK.sum() / SIZE)
    gap = (REFERENCE - LOGPS)[MASK]
    assert means["kl"] == pytest.approx((np.exp(gap) - gap - 1).mean(), abs=1e-5)
    ratio = np.exp(LOGPS - OLD)
    advantages = reference_advantages("grpo")[:, None]
    is_clipped = ((ratio > 1.1) & (advantages > 0)) | ((ratio < 0.9) & (advantages < 0))
    assert means["clip_ratio"] == pytest.approx(is_clipped[MASK].mean())
