"""The rollouts of a train stage: its batches and, with rewards, its loss."""

from ...config.grpo import GRPOLossConfig
from ...config.train import TrainConfig
from ...data.batching import BucketBatchSampler
from ...models.loader import LoadedModel
from ...training.grpo_loss import GRPOLoss
from ...training.rewards import RewardWorker, resolve_reward
from ...training.rollout_batches import Policy, RewardEvaluator, RolloutBatches
from ...training.step import TrainStep
from ..context import StageContext


class RolloutSetup:
    """What a train stage with a `rollouts` block trains on.

    Args:
        loaded: the model to train.

    Attributes:
        policy: the loss and the rewards; None for distillation.

    Raises:
        UserError: a reward function does not exist or is not allowed.
    """

    def __init__(self, config: TrainConfig, context: StageContext, loaded: LoadedModel):
        self.config = config
        self.context = context
        self.loaded = loaded
        self.worker: RewardWorker | None = None
        self.policy = self._policy(config.loss) if config.loss else None

    def prepare(
        self, step: TrainStep, batches: BucketBatchSampler, valid: BucketBatchSampler
    ) -> tuple[RolloutBatches, RewardEvaluator | None]:
        """Batches of completions of the prompts in `batches`, by the weights of `step`.

        Returns:
            The batches, and the measurement of the mean reward of `valid`; None
            without rewards.
        """
        context = self.context
        rollouts = RolloutBatches(
            step,
            batches,
            self.config,
            context.artifacts,
            self.loaded.tokenizer,
            context.logger,
            policy=self.policy,
            max_seq_length=context.data.max_seq_length,
            seed=context.seed,
        )
        if self.policy is None:
            return rollouts, None
        used = [
            index
            for batch in valid.in_order(self.config.eval_batches)
            for index in batch.example_indices
        ]
        examples = [valid.examples[index] for index in used]
        return rollouts, RewardEvaluator(rollouts, examples)

    def close(self) -> None:
        """End the process of the reward functions."""
        if self.worker:
            self.worker.close()

    def _policy(self, loss: GRPOLossConfig) -> Policy:
        if self.context.extensions.allow_python:
            self.worker = RewardWorker(loss.reward_timeout)
        rewards = [
            resolve_reward(name, self.context.find, self.worker)
            for name in loss.rewards
        ]
        rollouts = self.config.rollouts
        return Policy(
            GRPOLoss(
                loss,
                temperature=rollouts.temperature,
                max_tokens=rollouts.max_tokens,
            ),
            rewards,
        )
