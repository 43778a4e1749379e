"""What the compiled step costs over many batches: traces and memory."""

import mmap
import resource
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import MAX_SHAPES, BucketBatchSampler, head_fractions
from lmx.data.tokenization import Example
from lmx.training.chunked_loss import ChunkedLossModel
from lmx.training.step import TrainStep
from tiny_llamas import llama
from tiny_steps import Tiny, make_step, random_batch, random_examples

LONGEST = 2048


class CountingStep(TrainStep):
    """Counts how often MLX traces the gradients."""

    traces = 0

    def _gradients(self, *batch):
        self.traces += 1
        return super()._gradients(*batch)


def ragged_examples(count: int) -> list[Example]:
    """Log-normal lengths, and any share of prompts, which are not trained."""
    generator = np.random.default_rng(0)
    examples = []
    for index in range(count):
        length = int(np.clip(np.exp(generator.normal(5, 1.2)), 4, LONGEST + 1))
        mask = np.arange(length) >= generator.integers(1, length)
        tokens = np.ones(length, np.int32)
        examples.append(Example(tokens, mask, f"rows.jsonl:{index + 1}"))
    return examples


def test_ragged_batches_have_few_traces():
    """MLX keeps each compiled shape: mlx #4464, mlx-lm #1185."""
    model, _ = llama()
    chunked = ChunkedLossModel(model, 512)
    step = make_step(model, CountingStep, loss_model=chunked, name="sgd")
    parameters, state = dict(step.parameters), dict(step.optimizer.state)
    examples = ragged_examples(2500)
    batches = BucketBatchSampler(examples, max_seq_length=LONGEST, batch_tokens=LONGEST)
    shapes = set()
    for number in range(300):
        batch = batches(number)
        places = batch.head_positions
        shapes.add((batch.tokens.shape, places if places is None else places.size))
        # Nothing is computed.
        step(batch, 1e-3, number)
        step.parameters.update(parameters)
        step.optimizer.state.update(state)
    assert len(batches.shapes) > 10
    assert 20 < step.traces == len(shapes) <= MAX_SHAPES


def test_frequent_buckets_have_more_head_shapes():
    assert head_fractions([100]) == [8]
    assert head_fractions([10, 1000, 10]) == [8, 8, 8]
    many = head_fractions([1] * 14 + [50, 100])
    assert many[-2:] == [8, 8]
    assert sum(many) <= MAX_SHAPES
    assert head_fractions([5] * 40) == [1] * 40


def test_scalars_do_not_trace_again():
    """Learning rate, seed and requests to stop change in every step: mlx #1676."""
    step = make_step(Tiny(dropout=0.1), CountingStep)
    for number in range(20):
        step(random_batch(seed=number), 1e-3 / (number + 1), number, number == 19)
    assert step.traces == 1
    step(random_batch(length=9), 1e-3, 0)
    assert step.traces == 2


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("leak", [0, 1 << 15], ids=["", "control"])
def test_memory_is_flat_over_many_steps(leak):
    """Resident memory grew under a constant peak: mlx #3993, mlx-lm #828."""
    step = make_step(Tiny())
    examples = random_examples(200, 60)
    batches = BucketBatchSampler(examples, max_seq_length=64, batch_size=8)
    kept, sizes = [], []
    for number in range(1200):
        mx.eval(step(batches(number), 1e-3, number), step.parameters)
        if number % 50 == 0:
            step.evaluate(batches.in_order(2))
        if number % 100 == 0:
            sizes.append(resident_bytes())
        if leak:
            # Pages of its own: np.ones may get memory that an earlier test has freed.
            kept.append(mmap.mmap(-1, leak))
            kept[-1].write(bytes(leak))
    # All shapes are compiled after the first 200 steps.
    growth = sizes[-1] - sizes[2]
    assert (growth < 8 << 20) == (leak == 0), growth
