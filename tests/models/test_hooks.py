"""Hooks record and change layer calls, and then restore the model."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.models.hooks import (
    capture_inputs,
    hook_calls,
    override_inputs,
    override_outputs,
)
from lmx.models.loader import build_model
from tiny_checkpoints import LLAMA

TOKENS = mx.random.randint(0, 320, (2, 6), key=mx.random.key(0))
DOWN = "model.layers.0.mlp.down_proj"


def model_of(config=LLAMA):
    mx.random.seed(1)
    return build_model(config | {"num_hidden_layers": 1, "vocab_size": 320}).eval()


def test_overrides_replace_inputs_and_outputs():
    model = model_of()
    before = model(TOKENS)
    with capture_inputs(model, [DOWN]) as captured:
        model(TOKENS)
    x = captured.objects[DOWN]
    with override_inputs(model, {DOWN: x}):
        assert mx.array_equal(model(TOKENS), before)
    with override_inputs(model, {DOWN: mx.zeros_like(x)}):
        without = model(TOKENS)
    assert not mx.allclose(without, before)
    with override_outputs(model, [DOWN], mx.zeros_like):
        assert mx.array_equal(model(TOKENS), without)


def test_hooked_layers_are_restored_after_an_error():
    model = model_of()
    layer = model.layers[0].mlp.down_proj

    def fail(*_):
        raise ValueError("hook")

    with hook_calls(model, [DOWN], fail):
        assert model.layers[0].mlp.down_proj is not layer
        assert isinstance(model.layers[0].mlp.down_proj, nn.Linear)
        with pytest.raises(ValueError, match="hook"):
            model(TOKENS)
    assert model.layers[0].mlp.down_proj is layer
    with pytest.raises(KeyError), hook_calls(model, [DOWN], fail):
        raise KeyError
    assert model.layers[0].mlp.down_proj is layer
