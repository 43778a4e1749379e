"""A model small enough for finite differences, and random training data."""

from dataclasses import fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from lmx.data.batching import Batch
from lmx.data.tokenization import Example
from lmx.training.optimizers import OptimizerConfig
from lmx.training.step import TrainStep
from memory_at_rest import active_memory

VOCABULARY, WIDTH = 11, 6


class Rank:
    """A rank without communication."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.shard = lambda items: list(items)[rank::size]


class Tiny(nn.Module):
    """Embedding, tanh, dropout, linear: no attention between tokens."""

    def __init__(self, *, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        generator = np.random.default_rng(1)
        shape = (VOCABULARY, WIDTH)
        self.embedding = nn.Embedding(*shape)
        self.embedding.weight = mx.array(generator.normal(size=shape), mx.float32)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.head.weight = mx.array(generator.normal(size=shape), mx.float32)
        if bias:
            self.head.bias = mx.array(generator.normal(size=VOCABULARY), mx.float32)

    def __call__(self, tokens):
        return self.head(self.dropout(mx.tanh(self.embedding(tokens))))


def random_batch(sequences: int = 3, length: int = 7, *, seed: int = 0) -> Batch:
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCABULARY, (sequences, length + 1)).astype(np.int32)
    mask = generator.random((sequences, length)) < 0.5
    mask[:, 0] = True
    where = tuple(f"rows.jsonl:{index + 1}" for index in range(sequences))
    return Batch(mx.array(tokens), mx.array(mask), where)


def random_examples(count: int, longest: int, *, seed: int = 0) -> list[Example]:
    generator = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        length = int(generator.integers(2, longest + 1))
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        tokens = generator.integers(0, VOCABULARY, length).astype(np.int32)
        examples.append(Example(tokens, mask, f"rows.jsonl:{index + 1}"))
    return examples


def gradients_of(step: TrainStep, window) -> dict[str, np.ndarray]:
    """The mean gradients of one step of SGD: its first momentum is the gradient."""
    return loss_and_gradients(step, window)[1]


def loss_and_gradients(step: TrainStep, window):
    """The summed loss, and the mean gradients of one step of SGD."""
    loss = step(window, 0.0, 0)[0].item()
    return loss, {k: np.array(step.optimizer.state[k]["v"]) for k in step.parameters}


def peak_memory(step: TrainStep, window) -> int:
    """Bytes above the active ones that a compiled step takes at most."""
    mx.eval(step(window, 0.0, 0), step.parameters)
    active_memory()
    mx.eval(step(window, 0.0, 0), step.parameters)
    mx.synchronize()
    return mx.get_peak_memory() - mx.get_active_memory()


def assert_close(result, expected, rtol=1e-5, atol=1e-6):
    """Compare gradients; `atol` is that of gradients of at most 1."""
    assert result.keys() == expected.keys()
    for path, gradient in expected.items():
        allowed = atol * max(1.0, np.abs(gradient).max())
        np.testing.assert_allclose(result[path], gradient, rtol, allowed, err_msg=path)


def make_step(
    model: nn.Module, kind: type[TrainStep] = TrainStep, *, ranks=None, **settings
):
    """A train step; `settings` includes those of the optimizer.

    Args:
        ranks: processes with different examples.
    """
    if ranks is not None:
        settings["ranks"] = ranks
    names = {field.name for field in fields(OptimizerConfig)} & set(settings)
    optimizer = OptimizerConfig(**{name: settings.pop(name) for name in names})
    return kind(model, optimizer, **settings)
