"""Rollouts in batches of similar length: the same update as one batch of all."""

import itertools
from dataclasses import asdict
from hashlib import sha256
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TrainConfig
from lmx.data.batching import Batch, bucket_lengths
from lmx.files.artifacts import ArtifactStore
from lmx.generation.rollouts import Completion
from lmx.run.logger import RunLogger
from lmx.training.grpo_loss import GRPOLoss, group_advantages
from lmx.training.rewards import RewardSample
from lmx.training.rollout_batches import (
    KIND,
    Policy,
    RewardedCompletion,
    RolloutBatches,
)
from tiny_llamas import VOCABULARY, llama
from tiny_steps import make_step

PROMPTS, GROUP, LONGEST = 3, 4, 40
COUNT = PROMPTS * GROUP
DRAW = np.random.default_rng(0)
PROMPT_TOKENS = [
    DRAW.integers(1, VOCABULARY, DRAW.integers(2, 20)).tolist() for _ in range(PROMPTS)
]
COMPLETIONS = [
    DRAW.integers(1, VOCABULARY, DRAW.integers(1, 20)).tolist() for _ in range(COUNT)
]
LOGPS = [(-DRAW.exponential(1.0, len(tokens))).tolist() for tokens in COMPLETIONS]
REWARDS = DRAW.normal(size=COUNT)


def policy_loss(name: str) -> GRPOLoss:
    options = {"loss_type": name}
    if name == "gspo":
        options = {"importance_sampling_level": "sequence"}
    block = {"type": "grpo", "rewards": ["exact_match"]} | options
    config = TrainConfig(steps=1, batch_size=1, loss=block, rollouts={}).loss
    return GRPOLoss(config, temperature=1.0, max_tokens=20)


def make_batches(folder, loss: GRPOLoss, step) -> RolloutBatches:
    """Batches of the completions above, as a run has left them."""
    completions = [
        RewardedCompletion(
            PROMPT_TOKENS[row // GROUP],
            Completion(COMPLETIONS[row], LOGPS[row], True),
            RewardSample("", "", "", f"rows.jsonl:{row}"),
            {"draw": REWARDS[row]},
        )
        for row in range(COUNT)
    ]
    record = {"completions": [*map(asdict, completions)]}
    store = ArtifactStore(folder)
    # Not the first one, which compares log-probabilities.
    key = f"{1:08}-{sha256(b'examples ').hexdigest()}"
    store.put(KIND, key, lambda _: record)
    rollouts = {"num_generations": GROUP}
    return RolloutBatches(
        step,
        SimpleNamespace(indices=lambda step: [step], digest="examples"),
        TrainConfig(steps=1, batch_size=1, loss=loss.config, rollouts=rollouts),
        store,
        None,
        RunLogger(None, quiet=True),
        policy=Policy(loss, ()),
        max_seq_length=LONGEST,
        seed=0,
    )


def whole_batch(rewards=REWARDS) -> Batch:
    """All completions in one batch."""
    tokens = np.zeros((COUNT, LONGEST + 1), np.int32)
    mask = np.zeros((COUNT, LONGEST), bool)
    sampled = np.zeros((COUNT, LONGEST), np.float32)
    for row, completion in enumerate(COMPLETIONS):
        prompt = PROMPT_TOKENS[row // GROUP]
        stop = len(prompt) + len(completion)
        tokens[row, :stop] = prompt + completion
        mask[row, len(prompt) - 1 : stop - 1] = True
        sampled[row, len(prompt) - 1 : stop - 1] = LOGPS[row]
    rewards = mx.array(rewards, mx.float32)
    advantages = group_advantages(rewards.reshape(PROMPTS, GROUP), scale=True)
    target = advantages.reshape(-1), rewards, mx.array(sampled)
    where = tuple(map(str, range(COUNT)))
    return Batch(mx.array(tokens), mx.array(mask), where, target=target)


def update_of(
    loss: GRPOLoss, batch: Batch | None = None, folder=None
) -> dict[str, np.ndarray]:
    """The parameters after one step of plain SGD, and the loss and its metrics.

    Args:
        batch: all completions; None = batches of a run in `folder`.
    """
    model, _ = llama("lora")
    step = make_step(model, name="sgd", momentum=0.0, loss=loss)
    if batch is None:
        batches = make_batches(folder, loss, step)
        batch = [batches(GROUP + part) for part in range(GROUP)]
    output = step(batch, 0.5, 0)
    values = {"loss": output.loss_sum / output.loss_count, "metrics": output.metrics}
    return {key: np.array(v) for key, v in (step.parameters | values).items()}


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_update_is_that_of_all_completions_together(name, tmp_path):
    loss = policy_loss(name)
    values = update_of(loss, folder=tmp_path)
    expected = update_of(loss, whole_batch())
    for key, value in values.items():
        np.testing.assert_allclose(value, expected[key], atol=1e-5, err_msg=key)
    other = update_of(loss, whole_batch(np.roll(REWARDS, 1)))
    assert max(np.abs(values[key] - other[key]).max() for key in values) > 1e-3


def test_batches_have_similar_lengths_and_every_completion_once(tmp_path):
    step = make_step(llama("lora")[0])
    batches = make_batches(tmp_path, policy_loss("grpo"), step)
    parts = [batches(GROUP + part) for part in range(GROUP)]
    assert sorted(w for part in parts for w in part.where) == sorted(
        f"rows.jsonl:{row}" for row in range(COUNT)
    )
    assert [len(part.tokens) for part in parts] == [PROMPTS] * GROUP
    lengths = [(np.array(p.tokens) != 0).sum(axis=1) for p in parts]
    for shorter, longer in itertools.pairwise(lengths):
        assert shorter.max() <= longer.min()
    assert parts[0].tokens.shape[1] < parts[-1].tokens.shape[1]
    # The lengths of every rollout of the run, so that few shapes are compiled.
    lengths = bucket_lengths(LONGEST + batches.config.max_tokens)
    assert {part.tokens.shape[1] - 1 for part in parts} <= {*lengths}
