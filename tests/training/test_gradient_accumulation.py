"""Accumulated batches equal one batch: every trained token has equal weight."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.data.batching import Batch
from lmx.training.step import TrainStep
from memory_at_rest import active_memory
from tiny_llamas import GRID_MODES, llama, tokens_of
from tiny_steps import Tiny, assert_close, make_step, random_batch


def ragged(lengths) -> list[Batch]:
    return [tokens_of(2, length, seed=length) for length in lengths]


def joined(batches) -> Batch:
    """All sequences in one batch, padded to the longest."""
    longest = max(batch.mask.shape[1] for batch in batches)
    tokens, masks = [], []
    for batch in batches:
        room = ((0, 0), (0, longest - batch.mask.shape[1]))
        tokens.append(mx.pad(batch.tokens, room))
        masks.append(mx.pad(batch.mask, room))
    return Batch(mx.concatenate(tokens), mx.concatenate(masks), ())


def outputs(window, mode="full", **settings):
    model, fake_quant = llama(mode)
    step = make_step(model, weight_transform=fake_quant, name="sgd", **settings)
    metrics = [v.item() for v in step(window, 0.0, 0)[:4]]
    return metrics, {k: np.array(step.optimizer.state[k]["v"]) for k in step.parameters}


@pytest.mark.parametrize(
    ("mode", "lengths"),
    [
        *(("full", (3, 14)), ("full", (16, 4, 8, 13))),
        *((mode, (5, 9, 16)) for mode in ("lora", "lora-qat", *GRID_MODES)),
    ],
)
def test_accumulated_gradients_equal_one_batch(mode, lengths):
    window = ragged(lengths)
    counts = {batch.mask.sum().item() for batch in window}
    assert len(counts) == len(window)
    expected = outputs(joined(window), mode)
    result = outputs(window, mode)
    assert result[0] == pytest.approx(expected[0], rel=1e-5)
    assert_close(result[1], expected[1], atol=1e-5)


def test_clipping_applies_to_accumulated_gradients():
    window = ragged((3, 14))
    norm = outputs(window)[0][2]
    _, result = outputs(window, max_grad_norm=norm / 2)
    joint = sum((v.astype(np.float64) ** 2).sum() for v in result.values()) ** 0.5
    assert joint == pytest.approx(norm / 2, rel=1e-4)


def test_accumulation_sizes_can_vary_between_steps():
    """A window does not affect the gradients of the next."""
    windows = [
        [random_batch(seed=s) for s in range(first, last)]
        for first, last in ((0, 2), (2, 3), (3, 7), (7, 8))
    ]
    step, plain = make_step(Tiny()), make_step(Tiny())
    for seed, window in enumerate(windows):
        mx.eval(step(window, 1e-2, seed), step.parameters)
        mx.eval(plain(joined(window), 1e-2, seed), plain.parameters)
    for path, value in plain.parameters.items():
        np.testing.assert_allclose(step.parameters[path], value, rtol=1e-4, atol=1e-5)


def test_micro_batches_have_different_dropout():
    def loss(count, seed=0):
        step = make_step(Tiny(dropout=0.5))
        return step([random_batch()] * count, 0.0, seed)[0].item()

    assert loss(2) == loss(2) != loss(2, seed=1)
    assert loss(2) != pytest.approx(2 * loss(1), rel=1e-6)


def test_accumulation_compiles_once_per_shape(monkeypatch):
    traced = []
    real = TrainStep._gradients

    def counted(self, tokens, *arguments):
        traced.append(tokens.shape)
        return real(self, tokens, *arguments)

    monkeypatch.setattr(TrainStep, "_gradients", counted)
    step = make_step(Tiny())
    for seed in range(4):
        window = [random_batch(length=length, seed=seed) for length in (4, 7, 4, 7)]
        mx.eval(step(window, 1e-2, seed), step.parameters)
    assert sorted(traced) == [(3, 5), (3, 8)]


def test_accumulation_memory_is_constant():
    def peak(count):
        model, _ = llama(num_hidden_layers=3)
        step, window = make_step(model), [tokens_of(8, 48)] * count
        mx.eval(step(window, 0.0, 0), step.parameters)
        active_memory()
        mx.eval(step(window, 0.0, 0), step.parameters)
        return mx.get_peak_memory()

    assert peak(8) < 1.3 * peak(2)
