"""Training steps on pairs of completions: modes, chunks, micro-batches and ranks."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.train import TrainConfig
from lmx.data.batching import Batch, shard_batch
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.preference_loss import PreferenceLoss
from tiny_llamas import llama
from tiny_steps import Rank, make_step

LOSSES = ("dpo", "orpo", "kto")


def preference_loss(name: str) -> PreferenceLoss:
    return PreferenceLoss(TrainConfig(steps=1, batch_size=1, loss={"type": name}).loss)


def batch_of(name: str, pairs: int = 3, length: int = 11, *, seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 320, (2 * pairs, length + 1)).astype(np.int32)
    mask = generator.random((2 * pairs, length)) < 0.6
    reference = -generator.exponential(30, 2 * pairs)
    target = [mx.array(reference, mx.float32)] if name != "orpo" else []
    if name == "kto":
        labels = generator.random(pairs) < 0.5
        target.append(mx.array(np.repeat(labels, 2)))
    where = tuple(f"rows.jsonl:{n // 2 + 1}" for n in range(2 * pairs))
    return Batch(
        mx.array(tokens),
        mx.array(mask),
        where,
        target=tuple(target) or None,
        sequences_per_example=2,
    )


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some of the examples of a batch."""
    rows = slice(2 * start, 2 * stop)
    return Batch(
        batch.tokens[rows],
        batch.mask[rows],
        batch.where[rows],
        target=batch.target and tuple(value[rows] for value in batch.target),
        sequences_per_example=2,
    )


def update_of(name: str, mode: str, batches, **settings) -> dict[str, np.ndarray]:
    """The parameters after one step of plain SGD without clipping, and the loss."""
    model, fake_quant = llama(mode)
    if settings.pop("chunk", False):
        settings["loss_model"] = ChunkedLossModel(model, 7)
    step = make_step(
        model,
        weight_transform=fake_quant,
        loss=preference_loss(name),
        name="sgd",
        momentum=0.0,
        weight_decay=0.0,
        max_grad_norm=None,
        **settings,
    )
    output = step(batches, 1e-2, 0)
    values = {k: np.array(v) for k, v in step.parameters.items()}
    return values | {"loss": np.array(output.loss_sum / output.loss_count)}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("dpo", "full"), ("orpo", "lora"), ("kto", "qat"), ("dpo", "lora-qat")],
)
def test_chunks_and_checkpoints_give_the_same_update(name, mode):
    batch = batch_of(name)
    plain = update_of(name, mode, batch)
    assert_equal(plain, update_of(name, mode, batch, chunk=True))
    both = update_of(name, mode, batch, chunk=True, gradient_checkpointing=True)
    assert_equal(plain, both)


def test_micro_batches_of_kto_have_the_gradient_of_their_mean():
    """z is that of a micro-batch, so only equal ones give the same update."""
    batch = batch_of("kto", pairs=4)
    assert_equal(
        update_of("kto", "full", batch), update_of("kto", "full", [batch, batch])
    )


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_micro_batches_of_any_size_give_the_same_update(name):
    """Every pair counts once, whatever its tokens and the size of its batch."""
    batch = batch_of(name, pairs=5)
    whole = update_of(name, "full", batch)
    parts = [rows_of(batch, 0, 1), rows_of(batch, 1, 5)]
    assert_equal(whole, update_of(name, "full", parts))
    # The mean of the means of both parts would be another loss.
    halves = [update_of(name, "full", part)["loss"] for part in parts]
    assert abs(np.mean(halves) - whole["loss"]) > 1e-4


@pytest.mark.parametrize("name", LOSSES)
def test_ranks_get_whole_examples(name):
    batch = batch_of(name, pairs=3)
    first, second = (shard_batch(batch, Rank(rank, 2)) for rank in (0, 1))
    places = [places for shard in (first, second) for places in shard.where]
    assert places == [f"rows.jsonl:{n}" for n in (1, 1, 3, 3, 2, 2)]
    np.testing.assert_array_equal(first.tokens[2:], batch.tokens[4:6])
    # The second rank has one example less and gets one without trained tokens.
    assert second.tokens.shape == first.tokens.shape
    assert not second.mask[2:].any().item()
    for shard in (first, second):
        assert all(len(value) == 4 for value in shard.target or ())


def test_evaluation_returns_the_means_of_the_metrics():
    model, _ = llama()
    loss = preference_loss("dpo")
    step = make_step(model, loss=loss)
    batches = [batch_of("dpo", pairs=count, seed=count) for count in (1, 4)]
    output = step.evaluate(batches)
    assert output.loss_count == 5
    assert output.metrics.keys() == set(loss.metric_names)
    parts = [step.evaluate([batch]) for batch in batches]
    margins = [part.metrics["rewards/margins"] for part in parts]
    expected = (margins[0] + 4 * margins[1]) / 5
    assert output.metrics["rewards/margins"] == pytest.approx(expected, rel=1e-5)
