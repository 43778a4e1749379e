"""What a train stage minimizes, and the batches that it needs for that."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from ...config.train import TrainConfig
from ...data.batching import (
    Batch,
    BucketBatchSampler,
    ExampleDataset,
    StepSampler,
    TargetBatches,
)
from ...data.token_store import Encode
from ...models.cross_entropy import cross_entropy_sum
from ...training.grpo_loss import GRPOLoss
from ...training.losses import Loss, TokenLoss
from ...training.rewards import RewardWorker, resolve_reward
from ...training.rollout_batches import Policy, RewardEvaluator, RolloutBatches
from ...training.step import EvalOutput, TrainStep
from ..context import StageContext
from .qat import QATModel


class Objective:
    """The cross-entropy or the user's own loss, of the examples as they are.

    Args:
        model: the model to train, with its adapter.

    Attributes:
        loss: what is minimized.
        encode: makes the sequences of a record; None = one of each.
        policy: the loss and the rewards of rollouts; None = there are no rewards.
    """

    encode: Encode | None = None
    policy: Policy | None = None

    def __init__(self, config: TrainConfig, context: StageContext, model: QATModel):
        self.config = config
        self.context = context
        self.model = model
        self.loss: Loss = TokenLoss(context.extensions.loss or cross_entropy_sum)

    def encode_valid(self, batches: StepSampler) -> Encode | None:
        """`encode` for validation examples, given the training batches."""
        return self.encode

    def replace_completions(self, examples: ExampleDataset) -> ExampleDataset:
        """The training examples, possibly with other completions."""
        return examples

    def enable_packing(self) -> None:
        """Keep packed documents apart in every model that the loss runs.

        Raises:
            PackingUnsupported: an architecture cannot do that.
        """

    def training(
        self, batches: StepSampler, steps: int, compute: mx.Dtype
    ) -> StepSampler | TargetBatches:
        """Training batches with the targets that the loss needs.

        Args:
            steps: of the training.
            compute: dtype of the forward pass.

        Raises:
            UserError: the disk is too small for the targets, or the examples have one
                kind of label only.
        """
        return batches

    def validation(
        self, valid: BucketBatchSampler, batches: list[Batch], compute: mx.Dtype
    ) -> Sequence[Batch]:
        """Validation batches with the targets that the loss needs.

        Args:
            batches: those of `valid` that are used.
        """
        return batches

    def with_rollouts(
        self,
        step: TrainStep,
        batches: StepSampler | TargetBatches,
        valid: BucketBatchSampler,
    ) -> tuple[
        StepSampler | TargetBatches | RolloutBatches,
        Callable[[], EvalOutput] | None,
    ]:
        """The batches of the training, and what evaluates it in place of the loss.

        With a `rollouts` block, `step` samples completions of the prompts in `batches`,
        and with rewards their mean on `valid` is measured.
        """
        if not self.config.rollouts:
            return batches, None
        rollouts = RolloutBatches(
            step,
            batches,
            self.config,
            self.context.artifacts,
            self.model.loaded.tokenizer,
            self.context.logger,
            policy=self.policy,
            max_seq_length=self.context.data.max_seq_length,
            seed=self.context.seed,
        )
        if self.policy is None:
            return rollouts, None
        used = valid.in_order(self.config.eval_batches)
        indices = [index for batch in used for index in batch.example_indices]
        examples = [valid.examples[index] for index in indices]
        return rollouts, RewardEvaluator(rollouts, examples)

    def close(self) -> None:
        """End what still runs."""


class PolicyObjective(Objective):
    """A policy gradient of the rewards of completions.

    Raises:
        UserError: a reward function does not exist or is not allowed.
    """

    def __init__(self, config: TrainConfig, context: StageContext, model: QATModel):
        super().__init__(config, context, model)
        self._worker = None
        if context.extensions.allow_python:
            self._worker = RewardWorker(config.loss.reward_timeout)
        rollouts = config.rollouts
        self.loss = GRPOLoss(
            config.loss,
            temperature=rollouts.temperature,
            max_tokens=rollouts.max_tokens,
        )
        rewards = [
            resolve_reward(name, context.find, self._worker)
            for name in config.loss.rewards
        ]
        self.policy = Policy(self.loss, rewards)

    def close(self) -> None:
        """End the process of the reward functions."""
        if self._worker:
            self._worker.close()
