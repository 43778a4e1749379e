"""Training batches of the model's own completions.

The model samples completions for the prompts of a batch of examples when the first of
them is needed. They are kept on disk, so that a killed run goes on with the same
ones. Other examples or reward functions make other completions. A batch has as many of
them as there are prompts, of similar length.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import mlx.core as mx
import numpy as np

from ..config.train import TrainConfig
from ..cpu import multiplies_exactly
from ..data.batching import Batch, BucketBatchSampler, bucket_lengths
from ..data.tokenization import Example
from ..errors import UserError
from ..files.artifacts import ArtifactStore
from ..generation.completions import prompt_tokens
from ..generation.rollouts import Completion, sample_completions
from ..interfaces import Logger
from .grpo_loss import GRPOLoss, group_advantages
from .rewards import Reward, RewardSample
from .step import EvalOutput, TrainStep

# Largest difference between the log-probabilities of generation and training in
# float32, or with products in TF32. It is checked in one of so many batches.
MAX_LOGP_ERROR, MAX_LOGP_ERROR_TF32 = 1e-4, 0.05
CHECK_INTERVAL = 8
# Numbers of trained tokens that batches of one length may have; see `Batch`.
HEAD_FRACTIONS = 4
# Validation prompts that are decoded together.
EVAL_BATCH_SIZE = 64
# Artifacts: the completions of a batch, and the digest of the reward functions that
# failed first; see `RolloutBatches.digest`.
KIND = "rollouts"
FAILED_REWARDS = "failed_rewards", "first"


@dataclass(frozen=True)
class Policy:
    """How rollouts become the batches of a policy gradient.

    Attributes:
        loss: the loss of the batches.
        rewards: functions whose values are added.
    """

    loss: GRPOLoss
    rewards: Sequence[Reward]

    @property
    def digest(self) -> str:
        """Changes with the reward functions."""
        return " ".join(f"{reward.name} {reward.digest}" for reward in self.rewards)


@dataclass(frozen=True)
class RewardedCompletion:
    """A completion, what reward functions saw of it, and their values by name."""

    prompt: list[int]
    completion: Completion
    sample: RewardSample
    rewards: dict[str, float]

    @property
    def reward(self) -> float:
        """The sum of all rewards."""
        return sum(self.rewards.values())

    @property
    def sequence(self) -> list[int]:
        """The tokens of prompt and completion."""
        return self.prompt + self.completion.tokens

    @classmethod
    def from_json(cls, record: dict) -> "RewardedCompletion":
        """The object that `asdict` made the record of."""
        parts = {"completion": Completion, "sample": RewardSample}
        return cls(**record | {k: part(**record[k]) for k, part in parts.items()})


class RolloutBatches:
    """Batches by index; see the module.

    Args:
        step: the training step, whose current weights generate.
        examples: batches of the examples with the prompts.
        config: of the stage. A batch of prompts makes `num_generations` batches.
        store: keeps the completions, on rank 0.
        tokenizer: mlx-lm's TokenizerWrapper.
        policy: makes a policy gradient of them; None = only completions, as for
            distillation.
    """

    def __init__(
        self,
        step: TrainStep,
        examples: BucketBatchSampler,
        config: TrainConfig,
        store: ArtifactStore,
        tokenizer,
        logger: Logger,
        *,
        policy: Policy | None,
        max_seq_length: int,
        seed: int,
    ):
        self.step = step
        self.batches = examples
        self.config = config.rollouts
        self.store = store
        self.tokenizer = tokenizer
        self.logger = logger
        self.policy = policy
        self.max_seq_length = max_seq_length
        self.seed = seed
        self.accumulation = config.gradient_accumulation_steps
        # Those after the oldest checkpoint may be needed again.
        self.kept = config.save_steps * (config.save_total_limit + 1)
        # The reference of beta is the model before the training.
        self._initial = dict(step.parameters)
        # The digest of the reward functions that failed in this run.
        failed = store.find_on_first(*FAILED_REWARDS)
        self._first_rewards = (failed and failed.facts["digest"]) or self._rewards
        if self._first_rewards != self._rewards:
            logger.info("going on with other reward functions: the first failed")
        self._last: tuple[int, list[Batch]] | None = None
        self._has_warned = False

    @property
    def digest(self) -> str:
        """Hash of the examples and the reward functions.

        It does not change when functions that failed in this run are corrected.
        """
        return self._hash(self._first_rewards)

    @property
    def _rewards(self) -> str:
        return self.policy.digest if self.policy else ""

    def _hash(self, rewards: str) -> str:
        return sha256(f"{self.batches.digest} {rewards}".encode()).hexdigest()

    def indices(self, step: int) -> range:
        """The indices of the batches of a step, counted from 0."""
        # The same completions train `num_iterations` steps.
        prompts = self.batches.indices(step // self.config.num_iterations)
        start, parts = step * self.accumulation, self.config.num_generations
        return range(start * parts, (start + len(prompts)) * parts)

    def __call__(self, index: int) -> Batch:
        """The batch of an index, counted from 0."""
        index, part = divmod(index, self.config.num_generations)
        step, position = divmod(index, self.accumulation)
        first = step - step % self.config.num_iterations
        number = self.batches.indices(step // self.config.num_iterations)[position]
        if self._last is None or self._last[0] != number:
            rollout = self._rollout(number, first, is_first_use=step == first)
            batches = self._to_batches(rollout)
            if step == first and number % CHECK_INTERVAL == 0:
                self._check_log_probs(batches)
            self._last = number, batches
        return self._last[1][part]

    def _rollout(
        self, number: int, step: int, *, is_first_use: bool
    ) -> list[RewardedCompletion]:
        """The completions of a batch, from the store or from the model."""
        ranks = self.step.ranks
        if known := self.store.find_on_first(KIND, self._key(number)):
            records = known.facts["completions"]
        else:
            examples = self.batches(number).example_indices
            entropy = np.random.SeedSequence([self.seed, number])
            seed = entropy.generate_state(1, np.uint64)[0]
            completions = self.complete(
                [self.batches.examples[index] for index in examples],
                num_generations=self.config.num_generations,
                temperature=self.config.temperature,
                seed=int(seed),
            )
            records = [asdict(each) for each in completions]
            if ranks.is_first:
                facts = {"completions": records}
                self.store.put(KIND, self._key(number), lambda _: facts)
                kept = self.kept * self.accumulation
                near = range(number - kept + 1, number + kept)
                self.store.remove_others(KIND, {self._key(each) for each in near})
        if is_first_use and ranks.is_first:
            # Here, because a resumed run repeats the records.
            for record in records:
                row = {"step": step + 1, "prompt": record["sample"]["prompt"]}
                row["completion"] = record["sample"]["completion"]
                self.logger.sample(row | {"rewards": record["rewards"]})
        records = ranks.broadcast_object(records)
        return [RewardedCompletion.from_json(record) for record in records]

    def _key(self, number: int) -> str:
        return f"{number:08}-{self._hash(self._rewards)}"

    def complete(
        self,
        examples: Sequence[Example],
        *,
        num_generations: int,
        temperature: float,
        seed: int = 0,
    ) -> list[RewardedCompletion]:
        """Completions by the present weights, those of an example one after the other.

        All ranks generate. The first one, which alone calls the reward functions, gets
        the completions.

        Args:
            temperature: 0 = greedy.
        """
        prompts = [prompt_tokens(example) for example in examples]
        groups = sample_completions(
            self.step.materialize(),
            prompts,
            num_generations=num_generations,
            max_tokens=self.config.max_tokens,
            temperature=temperature,
            stop_tokens=frozenset(self.tokenizer.eos_token_ids),
            seed=seed,
            ranks=self.step.ranks,
        )
        rewarded: list[RewardedCompletion] = []
        if not self.step.ranks.is_first:
            return rewarded
        for example, prompt, group in zip(examples, prompts, groups, strict=True):
            text = self.tokenizer.decode(prompt)
            answer = self._text(example.tokens[len(prompt) :].tolist())
            for completion in group:
                shown = self._text(completion.tokens)
                sample = RewardSample(text, shown, answer, example.where)
                values = self._reward(sample)
                rewarded.append(RewardedCompletion(prompt, completion, sample, values))
        return rewarded

    def _reward(self, sample: RewardSample) -> dict[str, float]:
        rewards = self.policy.rewards if self.policy else ()
        try:
            return {reward.name: reward(sample) for reward in rewards}
        except UserError:
            # Of several failures, the first one counts.
            self.store.get_or_make(*FAILED_REWARDS, lambda _: {"digest": self._rewards})
            raise

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _to_batches(self, rollout: list[RewardedCompletion]) -> list[Batch]:
        """Batches of one sequence per prompt, the shortest sequences first."""
        count = self.config.num_generations
        # Little padding, and the activations of few sequences in memory.
        lengths = [len(each.sequence) for each in rollout]
        parts = np.argsort(lengths, kind="stable").reshape(count, -1)
        advantages = None
        if self.policy:
            rewards = np.array([each.reward for each in rollout], np.float32)
            scale = self.policy.loss.config.loss_type != "dr_grpo"
            groups = mx.array(rewards.reshape(-1, count))
            advantages = group_advantages(groups, scale=scale).reshape(-1)
        return [
            self._to_batch(
                [rollout[row] for row in rows],
                None if advantages is None else advantages[mx.array(rows)],
            )
            for rows in parts
        ]

    def _to_batch(
        self, rollout: list[RewardedCompletion], advantages: mx.array | None
    ) -> Batch:
        """The batch of some completions; with advantages it has a target."""
        longest = max(len(each.sequence) for each in rollout) - 1
        # MLX keeps a trace of every length.
        lengths = bucket_lengths(self.max_seq_length + self.config.max_tokens)
        length = next(n for n in lengths if n >= longest)
        tokens = np.zeros((len(rollout), length + 1), np.int32)
        mask = np.zeros((len(rollout), length), bool)
        sampled = np.zeros((len(rollout), length), np.float32)
        for row, each in enumerate(rollout):
            tokens[row, : len(each.sequence)] = each.sequence
            trained = slice(len(each.prompt) - 1, len(each.sequence) - 1)
            mask[row, trained] = True
            sampled[row, trained] = each.completion.logps
        batch = Batch(
            mx.array(tokens),
            mx.array(mask),
            tuple(each.sample.where for each in rollout),
            head_fractions=HEAD_FRACTIONS,
        )
        if advantages is None:
            return batch
        rewards = mx.array([each.reward for each in rollout])
        target = [advantages, rewards, mx.array(sampled)]
        if self.policy.loss.config.beta:
            temperature = self.policy.loss.temperature
            target.append(self.step.log_probs(batch, temperature, self._initial))
        return replace(batch, target=tuple(target))

    def _check_log_probs(self, batches: Sequence[Batch]) -> None:
        """Warn once if generation and training disagree about the model."""
        is_float32 = self.step.compute_dtype == mx.float32
        if self.policy is None or self._has_warned or not is_float32:
            return
        difference = 0.0
        for batch in batches:
            logps = self.step.log_probs(batch, self.policy.loss.temperature)
            errors = mx.abs(logps - batch.target[2])
            largest = mx.where(batch.mask, errors, 0.0).max().item()
            difference = max(difference, largest)
        limit = MAX_LOGP_ERROR if multiplies_exactly() else MAX_LOGP_ERROR_TF32
        if difference <= limit:
            return
        self._has_warned = True
        self.logger.warning(
            f"log-probabilities of generation and training differ by {difference:.2g}; "
            f"at most {limit:g} is expected in float32"
        )


class RewardEvaluator:
    """Mean reward of greedy completions of validation examples.

    Args:
        examples: with the prompts.
        batches: their model, rewards and settings are used.
    """

    def __init__(self, batches: RolloutBatches, examples: Sequence[Example]):
        self.batches = batches
        self.examples = examples

    def __call__(self) -> EvalOutput:
        """Minus the summed rewards, their number, and the mean reward."""
        total, count = 0.0, len(self.examples)
        for start in range(0, count, EVAL_BATCH_SIZE):
            examples = self.examples[start : start + EVAL_BATCH_SIZE]
            # The first rank has the rewards.
            completions = self.batches.complete(
                examples, num_generations=1, temperature=0.0
            )
            total += sum(each.reward for each in completions)
        (total,) = self.batches.step.ranks.all_reduce_scalars(total)
        return EvalOutput(-total, count, {"reward": total / count})
