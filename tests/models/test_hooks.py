"""Hooks record and change layer calls, and then restore the model."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx.models.hooks import (
    GradientTap,
    capture_inputs,
    hook_calls,
    override_inputs,
    override_outputs,
    path_of,
)
from lmx.models.loader import build_model
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 6), key=mx.random.key(0))
ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


def model_of(config=LLAMA):
    mx.random.seed(1)
    return build_model(config | {"num_hidden_layers": 1, "vocab_size": 320}).eval()


def test_capture_inputs_groups_layers_by_their_input():
    model = model_of()
    with capture_inputs(model, [DOWN, *ATTENTION]) as captured:
        model(TOKENS)
    assert captured.groups() == [ATTENTION, [DOWN]]
    width = model.layers[0].mlp.down_proj.weight.shape[1]
    assert captured.rows[DOWN].shape == (TOKENS.size, width)
    assert not captured.called_again


def test_capture_inputs_repeats_inputs_for_every_expert():
    model, path = model_of(QWEN3_MOE), "model.layers.0.mlp.switch_mlp.up_proj"
    with capture_inputs(model, [path]) as captured:
        model(TOKENS)
    assert captured.experts[path].size == len(captured.rows[path]) > TOKENS.size


def test_tied_embedding_is_hooked_as_lookup_and_head():
    model, tap = model_of(LLAMA | {"tie_word_embeddings": True}), GradientTap()
    with hook_calls(model, ["model.embed_tokens"], tap):
        logits = model(TOKENS)
    lookup, head = tap.inputs
    assert {path_of(lookup), path_of(head)} == {"model.embed_tokens"}
    assert mx.array_equal(tap.inputs[lookup], TOKENS)
    assert mx.array_equal(tap.outputs[head], logits)


def test_gradient_tap_adds_shifts_to_outputs():
    model, tap = model_of(), GradientTap()
    with hook_calls(model, [DOWN], tap):
        before = model(TOKENS)
    [(call, output)] = tap.outputs.items()
    with hook_calls(model, [DOWN], GradientTap({call: mx.zeros_like(output)})):
        assert mx.array_equal(model(TOKENS), before)
    with hook_calls(model, [DOWN], GradientTap({call: mx.ones_like(output)})):
        assert not mx.allclose(model(TOKENS), before)


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
