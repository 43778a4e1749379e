"""Policy gradient losses of groups of completions: GRPO and its variants.

With the ratio r = exp(logp - logp of the policy that sampled) of a token, the advantage
A of its completion, and the clipping to [1 - epsilon, 1 + epsilon_high]:

    token    -min(r A, clip(r) A) + beta (exp(d) - d - 1), d = reference logp - logp
    grpo     mean over the tokens of a completion, mean over completions
    dr_grpo  sum over the tokens / max_tokens, mean over completions
    dapo     mean over the tokens of all completions

With the importance sampling level "sequence" (GSPO) a completion has one ratio, r =
exp(mean of logp - logp of the policy that sampled).

Sources: see `config.grpo`. The KL estimate is Schulman's k3.
"""

import mlx.core as mx

from ..config.grpo import GRPOLossConfig
from ..data.batching import BatchArrays
from .losses import Loss, LossModel, LossSums

METRICS = ("reward", "completion_tokens", "clip_ratio", "kl")
# Keeps the advantages of a group finite whose rewards are almost equal.
MIN_STD = 1e-4


class GRPOLoss(Loss):
    """A loss over sampled completions, summed over a batch.

    Args:
        config: the loss and its parameters.
        temperature: of the sampled distribution.
        max_tokens: of a completion.
    """

    metric_names = METRICS
    main_metric = "reward"

    def __init__(self, config: GRPOLossConfig, *, temperature: float, max_tokens: int):
        self.config = config
        self.temperature = temperature
        self.max_tokens = max_tokens

    def __call__(self, model: LossModel, batch: BatchArrays) -> LossSums:
        """The sums of a batch; its target is what `from_log_probs` takes last."""
        logps = model.log_probs(batch, self.temperature)
        return self.from_log_probs(logps, batch.mask, *batch.target)

    def from_log_probs(
        self,
        token_logps: mx.array,
        mask: mx.array,
        advantages: mx.array,
        rewards: mx.array,
        old_logps: mx.array,
        reference_logps: mx.array | None = None,
    ) -> LossSums:
        """The summed loss, the number that it is divided by, and the metrics.

        Args:
            token_logps: float32 [B, L], log-probabilities of the targets.
            mask: bool [B, L], True where the target is trained.
            advantages, rewards: float32 [B].
            old_logps: float32 [B, L], of the policy that sampled.
            reference_logps: float32 [B, L]; None if beta is 0.

        Returns:
            loss: float32 scalar.
            count: float32 scalar, completions; for dapo tokens.
            metrics: float32 [2, metrics], sums and the numbers of their values.
        """
        config = self.config
        weights = mask.astype(mx.float32)
        lengths = weights.sum(axis=-1)
        log_ratio = mx.where(mask, token_logps - old_logps, 0.0)
        if config.importance_sampling_level == "sequence":
            mean = log_ratio.sum(axis=-1) / mx.maximum(lengths, 1)
            log_ratio = mx.broadcast_to(mean[:, None], mask.shape)
        ratio, advantage = mx.exp(log_ratio), advantages[:, None]
        high = config.epsilon_high or config.epsilon
        clipped = mx.clip(ratio, 1 - config.epsilon, 1 + high)
        losses = -mx.minimum(ratio * advantage, clipped * advantage)
        kl = mx.zeros_like(token_logps)
        if config.beta:
            gap = mx.where(mask, reference_logps - token_logps, 0.0)
            kl = mx.exp(gap) - gap - 1
            losses = losses + config.beta * kl
        losses = mx.where(mask, losses, 0.0)
        completions = (lengths > 0).astype(mx.float32)
        tokens, num_completions = lengths.sum(), completions.sum()
        if config.loss_type == "dapo":
            loss, count = losses.sum(), tokens
        elif config.loss_type == "dr_grpo":
            loss, count = losses.sum() / self.max_tokens, num_completions
        else:
            loss = (losses.sum(axis=-1) / mx.maximum(lengths, 1)).sum()
            count = num_completions
        is_clipped = ratio * advantage > clipped * advantage
        sums = [
            (rewards * completions).sum(),
            tokens,
            (is_clipped * weights).sum(),
            (kl * weights).sum(),
        ]
        counts = [num_completions, num_completions, tokens, tokens]
        # mx.compile fails on two outputs that are computed alike: count is another one.
        metrics = mx.stop_gradient(mx.stack([mx.stack(sums), mx.stack(counts)]))
        return loss, count, metrics


def group_advantages(rewards: mx.array, *, scale: bool) -> mx.array:
    """Rewards minus the mean of their group, float32 [groups, completions].

    Args:
        rewards: float32 [groups, completions].
        scale: divide by the standard deviation of the group.
    """
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    if scale:
        std = mx.sqrt(mx.var(rewards, axis=1, keepdims=True, ddof=1))
        advantages = advantages / (std + MIN_STD)
    return advantages
