"""The `loss` block of policy optimization, and the `rollouts` block."""

from typing import Literal

from pydantic import Field, model_validator

from .base import ConfigModel


class RolloutConfig(ConfigModel):
    """Completions that the model itself generates during the training. Quantization-
    aware training generates them with the quantized weights."""

    num_generations: int = Field(8, ge=1)
    """Completions per prompt. A batch has batch_size prompts, and so many completions
    are trained at a time."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens per completion."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature. The loss divides the logits by it, too."""
    num_iterations: int = Field(1, ge=1)
    """Optimizer steps on the same completions."""


class GRPOLossConfig(ConfigModel):
    """Group relative policy optimization (arXiv 2402.03300): clipped policy gradient of
    the model's own completions. The advantage of a completion is its reward minus the
    mean of its group, divided by the group's standard deviation."""

    type: Literal["grpo"] = "grpo"
    """Loss. Default: dpo."""
    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "grpo"
    """grpo: mean over the tokens of a completion, then over completions. dr_grpo: sum
    over the tokens divided by rollouts.max_tokens, and advantages are not divided by
    their standard deviation (arXiv 2503.20783). dapo: mean over the tokens of all
    completions (arXiv 2503.14476)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """sequence: one probability ratio per completion (GSPO, arXiv 2507.18071, with
    epsilon 3e-4 and epsilon_high 4e-4)."""
    rewards: list[str] = Field(
        min_length=1, examples=[["exact_match"], ["exact_match", "rewards.py:short"]]
    )
    """Reward functions, whose values are added. exact_match: 1 if a completion equals
    that of the example. exact_match:flexible-extract: 1 if the last numbers are equal.
    FILE.py:NAME: a Python function, only with --allow-python (docs/preference.md)."""
    reward_timeout: float = Field(10.0, gt=0, le=86_400)
    """Seconds that a reward function may take for one completion."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the model before the training, per token."""
    epsilon: float = Field(0.2, gt=0, lt=1)
    """Lower clipping of the probability ratio."""
    epsilon_high: float | None = Field(None, gt=0)
    """Upper clipping of the probability ratio. DAPO has 0.28. Default: epsilon."""

    @model_validator(mode="after")
    def _check_rewards(self):
        if len(set(self.rewards)) < len(self.rewards):
            raise ValueError("a reward function is named twice")
        return self
