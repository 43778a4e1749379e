"""Layer sensitivities compared with weight gradients and measured divergences."""

import mlx.core as mx
import numpy as np
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.models.float_formats import MODES
from lmx.models.hooks import path_of
from lmx.quantization.mixed_precision.search import GridEvaluator
from lmx.quantization.mixed_precision.sensitivity import (
    LayerStatistics,
    collect_stats,
    input_energies,
    sensitivity,
)
from lmx.quantization.packing import dequantize, pack
from mlx.utils import tree_flatten
from quantization_samples import enlarged_model
from tiny_checkpoints import LLAMA, QWEN3_MOE

SMALL = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64}
CONFIGS = {
    "tied": LLAMA | SMALL | {"tie_word_embeddings": True},
    "untied": LLAMA | SMALL | {"tie_word_embeddings": False},
    "experts": QWEN3_MOE | SMALL,
}
HEADS = ("lm_head", "model.embed_tokens")


def model_of(name):
    return enlarged_model(CONFIGS[name])


def collected(model, folder, count=2):
    paths = [p for p, m in model.named_modules() if hasattr(m, "to_quantized")]
    tokens = mx.random.randint(0, 64, (count, 40), key=mx.random.key(3))
    return paths, tokens, collect_stats(model, paths, tokens, folder)


def sampled_labels(model, tokens, tensors, stats):
    """Return the sampled tokens. Their logits have negative gradients."""
    [*_, head] = [c for c in stats.sources if c.startswith(HEADS)]
    labels = tensors[f"gradients.{head}"].argmin(axis=-1)
    logits = np.array(model(tokens)[0], dtype=np.float64)
    share = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    share[np.arange(len(share)), np.array(labels)] -= 1
    np.testing.assert_allclose(tensors[f"gradients.{head}"], share, atol=2e-5)
    return labels


@pytest.mark.parametrize("name", CONFIGS)
def test_collect_stats_inputs_and_gradients_give_weight_gradients(name, tmp_path):
    """A weight gradient is the sum of inputs times output gradients over all calls."""
    model = model_of(name)
    paths, tokens, stats = collected(model, tmp_path, count=1)
    [tensors] = stats.sequences()
    labels = sampled_labels(model, tokens, tensors, stats)

    def loss(parameters):
        model.update(parameters)
        logits = model(tokens)[0]
        label_logits = mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return (mx.logsumexp(logits, axis=-1) - label_logits).sum()

    before = model.parameters()
    expected = dict(tree_flatten(mx.grad(loss)(before)))
    model.update(before)
    assert {path_of(call) for call in stats.sources} == set(paths)
    for path in paths:
        actual = np.zeros(expected[f"{path}.weight"].shape)
        for call in stats.calls(path):
            source = stats.sources[call]
            x, gradients = (
                np.array(tensors[k]) for k in (f"inputs.{source}", f"gradients.{call}")
            )
            experts = tensors.get(f"experts.{source}")
            if experts is not None:
                np.add.at(actual, np.array(experts), gradients[:, :, None] * x[:, None])
            elif x.ndim == 1:
                np.add.at(actual, x, gradients)
            else:
                actual += gradients.T @ x
        scale = abs(actual).max()
        np.testing.assert_allclose(
            expected[f"{path}.weight"], actual, atol=1e-4 * scale, err_msg=path
        )


def test_calibration_stats_group_layers_with_one_input(tmp_path):
    stats = collected(model_of("experts"), tmp_path)[2]
    groups = [[path.split(".", 3)[-1] for path in g] for g in stats.groups()]
    assert groups[1:6] == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate"],
        ["mlp.switch_mlp.up_proj", "mlp.switch_mlp.gate_proj"],
        ["mlp.switch_mlp.down_proj"],
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_sensitivity_is_half_the_mean_squared_change(name, tmp_path):
    model = model_of(name)
    paths, tokens, stats = collected(model, tmp_path)
    modules, spec = dict(model.named_modules()), QuantSpec(bits=3, group_size=32)
    for path in paths:
        weight = modules[path].weight
        layer = LayerStatistics(weight, input_energies(path, weight.shape[-1], stats))
        error = np.array(layer.fake_quantize(spec), dtype=np.float64) - np.array(weight)
        total = 0.0
        for tensors in stats.sequences():
            for call in stats.calls(path):
                source = stats.sources[call]
                x, gradients = (
                    tensors[f"inputs.{source}"],
                    np.array(tensors[f"gradients.{call}"]),
                )
                experts = tensors.get(f"experts.{source}")
                for position, gradient in enumerate(gradients):
                    matrix = (
                        error if experts is None else error[experts[position].item()]
                    )
                    is_token = x.ndim == 1
                    output_change = (
                        matrix[x[position].item()]
                        if is_token
                        else matrix @ np.array(x[position])
                    )
                    total += (gradient @ output_change) ** 2
        [cost] = sensitivity(path, layer, [spec], stats)
        assert cost == pytest.approx(total / 2 / tokens.size, rel=1e-3), path


def test_layer_statistics_fake_quantize_beats_mlx_on_the_inputs(tmp_path):
    model = model_of("untied")
    stats = collected(model, tmp_path)[2]
    path, spec = "model.layers.1.mlp.down_proj", QuantSpec(bits=2, group_size=64)
    weight = dict(model.named_modules())[path].weight
    costs = input_energies(path, weight.shape[-1], stats)
    [*packed] = mx.quantize(weight, 64, 2)
    mlx_weight = mx.dequantize(*packed, 64, 2)
    fitted_weight = LayerStatistics(weight, costs).fake_quantize(spec)
    losses = [
        ((w - weight) ** 2 * costs).sum().item() for w in (fitted_weight, mlx_weight)
    ]
    assert losses[0] < 0.8 * losses[1]


@pytest.mark.parametrize("mode", MODES)
def test_floating_point_grids_are_fitted_with_the_costs_of_columns(mode):
    spec, costs = QuantSpec(mode=mode), mx.exp(mx.random.normal((64,)))
    weight = 0.2 * mx.random.normal((3, 40, 64))
    weight[:, :5] = 0
    fitted_weight = LayerStatistics(weight, costs).fake_quantize(spec)
    packed = pack(weight, spec, mx.float32)
    mlx_weight = dequantize(packed, spec, mx.float32)
    errors = [
        ((w - weight) ** 2 * costs).reshape(-1, spec.group_size).sum(axis=-1)
        for w in (fitted_weight, mlx_weight)
    ]
    assert mx.all(errors[0] <= errors[1] * (1 + 1e-5)).item()
    # All scales of mxfp8 have the same relative error.
    ratio = (errors[0].sum() / errors[1].sum()).item()
    assert ratio < {"mxfp8": 1.001, "mxfp4": 0.97, "nvfp4": 0.9}[mode]
    assert mx.all(fitted_weight[:, :5] == 0).item()


@pytest.mark.parametrize("name", ["tied", "experts"])
def test_sensitivity_predicts_the_divergence_of_one_quantized_layer(name, tmp_path):
    model = model_of(name)
    paths, tokens, stats = collected(model, tmp_path, count=24)
    if name == "experts":
        # An error before a router can also change the selected experts.
        paths = [p for p in paths if "layers.1.mlp.switch" in p or p == "lm_head"]
    before = dict(tree_flatten(model.parameters()))
    layers = {}
    for path in paths:
        weight = before[f"{path}.weight"]
        layers[path] = LayerStatistics(
            weight, input_energies(path, weight.shape[-1], stats)
        )
    energies = {path: layer.costs for path, layer in layers.items()}
    evaluator = GridEvaluator(model, energies, tokens, tmp_path, mx.float32)
    spec = QuantSpec(bits=4, group_size=32)
    errors = []
    for path, layer in layers.items():
        [predicted] = sensitivity(path, layer, [spec], stats)
        errors.append(np.log(predicted / evaluator({path: spec})))
        evaluator.close()
    assert np.median(np.abs(errors)) < 0.2
    assert np.abs(errors).max() < 1
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], value) for name, value in before.items())
