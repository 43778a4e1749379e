"""SmoothQuant keeps what a model computes, and evens out the inputs of layers."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.config.quantize import GPTQConfig, RTNConfig
from lmx.errors import USAGE, UserError
from lmx.models.blockwise import BlockwiseModel
from lmx.models.hooks import capture_inputs
from lmx.quantization.ptq.base import PTQContext
from lmx.quantization.ptq.channel_scales.channel_scales import (
    SCALES,
    SmoothQuant,
    smooth,
    smoothing_scale,
)
from lmx.quantization.ptq.methods import METHODS
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten
from pydantic import ValidationError
from quantization_samples import context_of, windows_of
from tiny_families import VOCABULARY, member

TOKENS = mx.random.randint(0, VOCABULARY, (6, 16), key=mx.random.key(1))
OTHERS = mx.random.randint(0, VOCABULARY, (2, 16), key=mx.random.key(2))
GRID = {"mode": "nvfp4", "quantize_activations": True}


def settings(strength=0.5, config=RTNConfig, **keys):
    return config(**GRID, smoothing_strength=strength, **keys)


def task(family, folder, config, counted=None) -> PTQContext:
    model = member(family)
    specs, windows = select_layers(model, config).specs, windows_of(TOKENS, counted)
    return context_of(model, specs, windows, folder, reread=partial(member, family))


def inputs_of(model, path, tokens=TOKENS):
    with capture_inputs(model, [path]) as captured:
        mx.eval(model(tokens))
    return np.array(captured.rows[path], np.float64)


@pytest.mark.parametrize("strength", [0.3, 0.5, 1])
def test_scale_is_that_of_the_paper(strength):
    inputs, weights = (
        np.exp(np.random.default_rng(seed).normal(size=64)) for seed in (0, 1)
    )
    expected = inputs**strength / weights ** (1 - strength)
    scale = np.array(smoothing_scale(mx.array(inputs), mx.array(weights), strength))
    assert np.allclose(scale / scale[0], expected / expected[0], rtol=1e-5)
    if strength == 0.5:
        assert np.allclose(scale, expected, rtol=1e-5)
    # Both ranges are the same on average.
    ratios = np.log(inputs / scale) - np.log(weights * scale)
    assert ratios.mean() == pytest.approx(0, abs=1e-5)


def test_channels_without_inputs_have_a_finite_scale():
    inputs, weights = mx.array([0.0, 1.0, 2.0]), mx.array([1.0, 0.0, 1.0])
    scale = smoothing_scale(inputs, weights, 0.5)
    assert mx.isfinite(scale).all()
    assert (scale > 0).all()
    assert mx.allclose(smoothing_scale(mx.zeros(3), mx.zeros(3), 0.5), mx.ones(3))


# Gemma adds 1 to the weights of its norms and ties its head. The experts of Qwen2 share
# their input with a layer whose inputs are quantized; those of Qwen3 do not.
@pytest.mark.parametrize(
    ("family", "places"),
    [
        *(("llama", 6), ("gemma", 6), ("qwen3_moe", 2), ("qwen2_moe", 4)),
        *(("phi3", 6), ("olmo2", 2)),
    ],
)
def test_smoothed_model_computes_the_same(tmp_path, family, places):
    context = task(family, tmp_path, settings())
    smoothing = smooth(context, settings())
    assert len(smoothing.places) == places
    assert all(scale.max() > 1.1 * scale.min() for _, scale in smoothing.places)
    expected, smoothed = context.model(OTHERS), smoothing.context(context).model
    tolerance = 1e-5 * mx.abs(expected).max()
    assert mx.abs(smoothed(OTHERS) - expected).max() <= tolerance
    # With a part of the weights it is another model.
    part = smoothing.unquantized(context)
    other = member(family)
    other.load_weights(list(part.items()), strict=False)
    changed = mx.abs(other(OTHERS) - expected).max() > 100 * tolerance
    assert changed.item() == bool(part)


def test_scale_is_of_the_inputs_in_the_whole_model(tmp_path):
    context = task("llama", tmp_path, settings())
    mapping, scale = smooth(context, settings()).places[-1]
    path = "model.layers.1.mlp.down_proj"
    assert mapping.consumers == (path,)
    inputs = inputs_of(context.model, path).reshape(*TOKENS.shape, -1)
    largest = np.abs(inputs).max(axis=1).mean(axis=0)
    weight = dict(tree_flatten(context.model.parameters()))[f"{path}.weight"]
    columns = np.abs(np.array(weight, np.float64)).max(axis=0)
    assert np.allclose(scale, np.sqrt(largest / columns), rtol=1e-4)


def test_result_does_not_depend_on_the_size_of_weights(tmp_path):
    """Groups of small weights have inexact scales in nvfp4: smoothing corrects it."""
    context = task("llama", tmp_path / "plain", settings())

    def small() -> nn.Module:
        model = member("llama")
        for layer in model.layers:
            layer.input_layernorm.weight *= 64
            layer.self_attn.q_proj.weight /= 64
            layer.self_attn.k_proj.weight /= 64
            layer.self_attn.v_proj.weight /= 64
        return model

    other = replace(context, model=small(), reread=small, folder=tmp_path / "small")
    path = "model.layers.1.self_attn.k_proj.weight"
    expected, smoothed, original = (
        dict(tree_flatten(model.parameters()))[path]
        for model in (
            smooth(context, settings()).context(context).model,
            smooth(other, settings()).context(other).model,
            other.model,
        )
    )
    assert mx.allclose(smoothed, expected, rtol=1e-4)
    errors = [error_of_rtn(weight) for weight in (expected, smoothed, original)]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)
    assert errors[2] > 1.5 * errors[0]


def error_of_rtn(weight) -> float:
    grid = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    rounded = mx.dequantize(*mx.quantize(weight, **grid), **grid, dtype=mx.float32)
    return (mx.linalg.norm(rounded - weight) / mx.linalg.norm(weight)).item()


def test_padding_has_no_part_in_the_scales(tmp_path):
    counted = np.zeros(TOKENS.shape, bool)
    counted[:, :5] = True
    context = task("llama", tmp_path, settings(1), counted)
    mapping, scale = smooth(context, settings(1)).places[0]
    inputs = inputs_of(context.model, mapping.consumers[0])
    for rows, is_equal in (
        (inputs.reshape(*TOKENS.shape, -1)[:, :5], True),
        (inputs.reshape(*TOKENS.shape, -1), False),
    ):
        largest = np.abs(rows).max(axis=1).mean(axis=0)
        ratio = np.array(scale) / largest
        assert np.allclose(ratio, ratio[0], rtol=1e-4) == is_equal


def test_unquantized_layers_get_their_part(tmp_path):
    """A layer that the recipe skips is fed by a smoothed norm."""
    config = settings(overrides={"*.q_proj": "skip", "*.down_proj": "skip"})
    context = task("llama", tmp_path, config)
    smoothing = smooth(context, config)
    changed = smoothing.unquantized(context)
    assert {name.split(".", 3)[-1] for name in changed} == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_proj.weight",
    }
    # In front of down_proj there is nothing to gain.
    consumers = {path for mapping, _ in smoothing.places for path in mapping.consumers}
    assert not any(path.endswith("down_proj") for path in consumers)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_methods_quantize_the_smoothed_model(tmp_path, method):
    configs = {"rtn": RTNConfig, "gptq": partial(GPTQConfig, effort="fast")}
    config = settings(config=configs[method])
    context = task("llama", tmp_path, config)
    smoothing = smooth(context, config)
    smoothed = dict(tree_flatten(smoothing.context(context).model.parameters()))
    original = dict(tree_flatten(context.model.parameters()))
    tensors = METHODS[method](config, smoothing.context(context)).quantize()
    grid = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    for path in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        weight = mx.dequantize(
            tensors[f"{path}.weight"], tensors[f"{path}.scales"], **grid
        ).astype(mx.float32)
        off = [
            mx.linalg.norm(weight - weights[f"{path}.weight"]).item()
            for weights in (smoothed, original)
        ]
        assert off[0] < 0.2 * mx.linalg.norm(smoothed[f"{path}.weight"]).item()
        assert off[0] < 0.7 * off[1]


def test_scales_are_kept_for_a_resumed_run(tmp_path, monkeypatch):
    config = settings()
    context = task("llama", tmp_path, config)
    first = smooth(context, config)
    searched = []
    search = SmoothQuant.scale

    def recorded(self, *arguments):
        searched.append(self.strength)
        return search(self, *arguments)

    monkeypatch.setattr(SmoothQuant, "scale", recorded)
    second = smooth(context, config)
    assert not searched
    for (mapping, scale), (other, other_scale) in zip(
        first.places, second.places, strict=True
    ):
        assert mapping == other
        assert mx.array_equal(scale, other_scale)
    smooth(context, settings(0.7))
    files = (tmp_path / "smoothquant").rglob(SCALES)
    file = max(files, key=lambda path: path.stat().st_mtime_ns)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    smooth(context, settings(0.7))
    # Of two blocks, and then of the damaged one.
    assert searched == 9 * [0.7]


def test_models_that_cannot_be_smoothed_are_refused(tmp_path):
    # Every layer of a block of GPT-2 has a bias, and stays unquantized.
    context = task("gpt2", tmp_path, settings())
    with pytest.raises(UserError, match="can take the scales") as error:
        smooth(context, settings())
    assert error.value.code == USAGE
    assert error.value.hint == "remove smoothing_strength"
    # The default is used where it can be.
    smoothing = smooth(context, settings(None))
    assert smoothing.places == []
    assert smoothing.unquantized(context) == {}
    assert mx.array_equal(
        smoothing.context(context).model(OTHERS), context.model(OTHERS)
    )

    class NoBlocks(nn.Module):
        pass

    with pytest.raises(UserError, match="no list of transformer blocks") as error:
        BlockwiseModel(NoBlocks(), hint=SmoothQuant.hint)
    assert error.value.hint == "remove smoothing_strength"


def test_default_is_for_4_bit_activations():
    assert settings(None).smoothing == 0.5
    assert settings(0).smoothing == 0
    assert RTNConfig(mode="mxfp8", quantize_activations=True).smoothing == 0
    assert RTNConfig(mode="nvfp4").smoothing == 0
    # RTN alone has nothing to compare with.
    assert not settings(0).compares_with_rtn
    assert settings(None).compares_with_rtn


@pytest.mark.parametrize("keys", [{"mode": "nvfp4"}, {}, {"mode": "mxfp4"}])
def test_smoothing_needs_quantized_activations(keys):
    with pytest.raises(ValidationError, match="needs quantize_activations: true"):
        RTNConfig(**keys, smoothing_strength=0.5)
