"""The `loss` block of policy optimization, and the `rollouts` block."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import ConfigModel

Lower = Annotated[float, Field(gt=0, lt=1)]
Upper = Annotated[float, Field(gt=0)]


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


class PolicyLossConfig(ConfigModel):
    """Keys of all losses of rewards: the clipped policy gradient of completions whose
    advantage is their reward minus the mean of their group."""

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
    epsilon: Lower = 0.2
    """Lower clipping of the probability ratio."""
    epsilon_high: Upper = 0.2
    """Upper clipping of the probability ratio."""

    @model_validator(mode="after")
    def _check_rewards(self):
        if len(set(self.rewards)) < len(self.rewards):
            raise ValueError("a reward function is named twice")
        return self


class GRPOLossConfig(PolicyLossConfig):
    """Group relative policy optimization (arXiv 2402.03300): clipped policy gradient
    of the model's own completions, from the difference between their rewards and the
    mean of their group, divided by its standard deviation. Mean over the tokens of a
    completion."""

    type: Literal["grpo"] = "grpo"
    """Loss. Default: dpo."""


class DrGRPOLossConfig(PolicyLossConfig):
    """GRPO without its biases (arXiv 2503.20783): rewards are not divided by their
    standard deviation, and the sum over tokens is divided by rollouts.max_tokens."""

    type: Literal["dr_grpo"] = "dr_grpo"
    """Loss. Default: dpo."""


class DAPOLossConfig(PolicyLossConfig):
    """GRPO with the mean over the tokens of all completions, and with a higher upper
    clipping (arXiv 2503.14476)."""

    type: Literal["dapo"] = "dapo"
    """Loss. Default: dpo."""
    epsilon_high: Upper = 0.28
    """Upper clipping of the probability ratio."""


class GSPOLossConfig(PolicyLossConfig):
    """GRPO with one probability ratio per completion (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    """Loss. Default: dpo."""
    epsilon: Lower = 3e-4
    """Lower clipping of the probability ratio."""
    epsilon_high: Upper = 4e-4
    """Upper clipping of the probability ratio."""
