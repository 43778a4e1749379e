"""Recomputed blocks give equal gradients, and are restored afterwards."""

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.errors import UserError
from lmx.models.hooks import ModuleProxy, replace_module
from lmx.training import gradient_checkpointing
from lmx.training.gradient_checkpointing import checkpointed
from tiny_llamas import GRID_MODES, MODES, llama, tokens_of
from tiny_steps import Tiny, loss_and_gradients, make_step, peak_memory


def outputs(mode, *, dropout=0.0, **settings):
    """Loss and gradients of a compiled step."""
    model, fake_quant = llama(mode, dropout=dropout)
    step = make_step(model, weight_transform=fake_quant, name="sgd", **settings)
    return loss_and_gradients(step, tokens_of())


@pytest.mark.parametrize("mode", MODES + GRID_MODES)
def test_checkpointing_keeps_loss_and_gradients(mode):
    loss, expected = outputs(mode)
    again, result = outputs(mode, gradient_checkpointing=True)
    assert again == pytest.approx(loss, rel=1e-6)
    assert result.keys() == expected.keys()
    for path, gradient in expected.items():
        assert np.abs(gradient).max() > 0, path
        np.testing.assert_allclose(result[path], gradient, rtol=1e-5, atol=1e-6)


def test_checkpointing_replays_dropout(monkeypatch):
    settings = {"dropout": 0.5, "gradient_checkpointing": True}
    loss, result = outputs("lora", **settings)
    # Without recomputation, with the same random draws.
    monkeypatch.setattr(
        gradient_checkpointing.mx, "checkpoint", lambda function: function
    )
    once, expected = outputs("lora", **settings)
    assert loss == once != outputs("lora")[0]
    for path, gradient in expected.items():
        np.testing.assert_allclose(result[path], gradient, rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """A block that counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return mx.tanh(self.linear(x))


class Stack(nn.Module):
    """A sequence of blocks; a block may occur twice."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = blocks

    def __call__(self, x):
        for block in self.layers:
            x = block(x)
        return x


def replaced(model):
    """A context in which the blocks of a model are checkpointed, as in a step."""
    blocks = model.layers
    proxies = [ModuleProxy(block, checkpointed(block, block)) for block in blocks]
    return replace_module(model, "layers", proxies)


def gradient(model, x, *, checkpoints):
    """Gradients of all parameters."""

    def loss(parameters):
        model.update(parameters)
        with replaced(model) if checkpoints else nullcontext():
            return model(x).sum()

    before = model.parameters()
    result = mx.grad(loss)(before)
    mx.eval(result)
    model.update(before)
    return result


def test_checkpointed_block_used_twice_sums_gradients():
    shared = Counting()
    model, x = Stack([shared, Counting(), shared]), mx.ones((2, 4))
    expected = gradient(model, x, checkpoints=False)["layers"][0]["linear"]["weight"]
    result = gradient(model, x, checkpoints=True)["layers"][0]["linear"]["weight"]
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_checkpointing_refuses_a_model_without_blocks():
    with pytest.raises(UserError, match="no list of blocks"):
        make_step(Tiny(), gradient_checkpointing=True)


def test_checkpointing_uses_less_memory():
    def peak(**settings):
        model, _ = llama(num_hidden_layers=6)
        return peak_memory(make_step(model, **settings), tokens_of(8, 128))

    assert peak(gradient_checkpointing=True) < 0.7 * peak()
