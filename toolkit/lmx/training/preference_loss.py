"""Preference losses of the log-probabilities that the model gives to completions.

A batch has two sequences for each example, one after the other: the chosen and the
rejected completion, or for KTO a completion and that of another example. With S the sum
of a completion's log-probabilities, n its tokens, r = S - S of the reference, and
d(x) = x of the chosen completion - x of the rejected one:

    dpo     -log sigmoid(beta d(r))          label smoothing: with the probability e the
    cpo     -log sigmoid(beta d(S))          sign of the argument is the other one
    simpo   -log sigmoid(beta d(S / n) - gamma)
    ipo     (d(r / n) - 1 / (2 beta))^2
    orpo    -beta log sigmoid(d(log odds)), odds = p / (1 - p), p = exp(S / n)
    kto     weight (1 - sigmoid(+-beta (r - z))), z = max(0, mean r of the others)

All but kto add sft_weight times -S / n of the chosen completion.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..config.preference import PreferenceLossConfig
from ..data.batching import BatchArrays
from .losses import Loss, LossModel, LossSums

# Losses that compare with the model before the training.
WITH_REFERENCE = ("dpo", "ipo", "kto")
PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)
KTO_METRICS = ("rewards/chosen", "rewards/rejected", "kl")
# Below it, 1 - p of the odds is rounded to nothing.
MAX_MEAN_LOGP = -1e-6


class Completions(NamedTuple):
    """The completions of one side of the examples in a batch, float32 [N] each.

    Attributes:
        logps: summed log-probabilities of the trained tokens.
        counts: trained tokens.
        reference: `logps` of the reference; None if the loss has none.
    """

    logps: mx.array
    counts: mx.array
    reference: mx.array | None

    @property
    def mean(self) -> mx.array:
        """Log-probability per token."""
        return self.logps / mx.maximum(self.counts, 1)

    @property
    def log_ratio(self) -> mx.array:
        """Log-ratio of model and reference."""
        return self.logps - self.reference


# What the losses compare of a completion.
VALUES: dict[str, Callable[[Completions], mx.array]] = {
    "dpo": lambda side: side.log_ratio,
    "ipo": lambda side: side.log_ratio / mx.maximum(side.counts, 1),
    "cpo": lambda side: side.logps,
    "simpo": lambda side: side.mean,
    "orpo": lambda side: log_odds(side.mean),
}


class PreferenceLoss(Loss):
    """A loss over pairs of sequences, summed over the examples of a batch.

    Args:
        config: the loss and its parameters.

    Attributes:
        needs_reference: whether batches carry the reference's log-probabilities.
    """

    def __init__(self, config: PreferenceLossConfig):
        self.config = config
        self.needs_reference = config.type in WITH_REFERENCE
        self.is_paired = config.is_paired
        self.metric_names = PAIR_METRICS if self.is_paired else KTO_METRICS
        self.main_metric = "rewards/accuracies" if self.is_paired else "kl"

    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The sums of a batch; its target is what `from_log_probs` takes last."""
        target = batch.target or ()
        return self.from_log_probs(model.log_probs(batch), batch.mask, *target)

    def from_log_probs(
        self,
        token_logps: mx.array,
        mask: mx.array,
        reference: mx.array | None = None,
        labels: mx.array | None = None,
    ) -> LossSums:
        """The loss summed over the examples, their number, and the metrics.

        Sequences without a trained token fill a batch and do not count.

        Args:
            token_logps: float32 [2 N, L], log-probabilities of the targets.
            mask: bool [2 N, L], True where the target is trained.
            reference: float32 [2 N], summed log-probabilities of the reference.
            labels: bool [2 N], True for a desirable completion; for KTO.

        Returns:
            loss: float32 scalar.
            count: float32 scalar.
            metrics: float32 [2, metrics], sums and the numbers of their values.
        """
        logps = mx.where(mask, token_logps, 0.0).sum(axis=-1)
        counts = mask.sum(axis=-1).astype(mx.float32)
        first, second = (
            Completions(
                logps[side::2],
                counts[side::2],
                None if reference is None else reference[side::2],
            )
            for side in (0, 1)
        )
        valid = ((first.counts > 0) & (second.counts > 0)).astype(mx.float32)
        # Summed once: mx.compile fails on an output that equals another sum.
        count = valid.sum()
        if self.is_paired:
            losses, metrics = self._pairs(first, second)
        else:
            losses, metrics = self._kto(first, second, labels[::2], valid, count)
        # Zero times infinity is no number, so examples are selected and not weighted.
        losses = mx.where(valid > 0, losses, 0.0)
        chosen = [(values, (valid > 0) & selected) for values, selected in metrics]
        sums = [mx.where(selected, values, 0.0).sum() for values, selected in chosen]
        counts = [selected.sum().astype(mx.float32) for _, selected in chosen]
        metrics = mx.stop_gradient(mx.stack([mx.stack(sums), mx.stack(counts)]))
        return losses.sum(), count, metrics

    def _pairs(self, chosen: Completions, rejected: Completions):
        config = self.config
        beta, value = config.beta, VALUES[config.type]
        # In ipo and orpo beta scales the loss, not the margin.
        scale = 1.0 if config.type in ("ipo", "orpo") else beta
        values = [scale * value(side) for side in (chosen, rejected)]
        margin = values[0] - values[1]
        if config.type == "ipo":
            losses = mx.square(margin - 1 / (2 * beta))
        elif config.type == "simpo":
            losses = -nn.log_sigmoid(margin - config.gamma)
        elif config.type == "orpo":
            losses = -beta * nn.log_sigmoid(margin)
        else:
            smoothing = config.label_smoothing
            losses = -(1 - smoothing) * nn.log_sigmoid(margin)
            if smoothing:
                losses = losses - smoothing * nn.log_sigmoid(-margin)
        if config.sft_weight:
            losses = losses - config.sft_weight * chosen.mean
        rewards = [beta / scale * value for value in values]
        accuracy = (margin > 0).astype(mx.float32)
        metrics = (*rewards, rewards[0] - rewards[1], accuracy)
        metrics = (*metrics, chosen.logps, rejected.logps)
        return losses, [(values, True) for values in metrics]

    def _kto(self, completions: Completions, others: Completions, labels, valid, count):
        config, beta = self.config, self.config.beta
        ratios = mx.where(valid > 0, others.log_ratio, 0.0)
        kl = mx.stop_gradient(mx.maximum(ratios.sum() / mx.maximum(count, 1), 0))
        reward = beta * (completions.log_ratio - kl)
        desirable = config.desirable_weight * (1 - mx.sigmoid(reward))
        undesirable = config.undesirable_weight * (1 - mx.sigmoid(-reward))
        rewards = beta * completions.log_ratio
        kl = mx.broadcast_to(kl, rewards.shape)
        metrics = [(rewards, labels), (rewards, ~labels), (kl, True)]
        return mx.where(labels, desirable, undesirable), metrics


def log_odds(mean_logp: mx.array) -> mx.array:
    """log(p / (1 - p)) of p = exp(mean_logp)."""
    mean_logp = mx.minimum(mean_logp, MAX_MEAN_LOGP)
    # log1p(-exp(x)) loses all digits for x near zero, expm1 does not.
    return mean_logp - mx.log(-mx.expm1(mean_logp))
