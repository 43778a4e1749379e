"""Bits and error of every layer, compared with float64 NumPy."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lmx.evaluation.weight_error import measure_layers


class Model(nn.Module):
    """Two linear layers behind a norm and an embedding."""

    def __init__(self):
        super().__init__()
        mx.random.seed(3)
        self.embed = nn.Embedding(40, 64)
        self.norm = nn.RMSNorm(64)
        self.layers = [nn.Linear(64, 96), nn.Linear(96, 48, bias=False)]


def loaded(model):
    return SimpleNamespace(model=model, dtype=mx.float16)


def quantized():
    model = Model()
    kinds = {"layers.0": (32, 3, "affine"), "layers.1": (16, 4, "nvfp4")}

    def kind(path, _):
        names = ("group_size", "bits", "mode")
        return path in kinds and dict(zip(names, kinds[path], strict=True))

    nn.quantize(model, class_predicate=kind)
    return model


def test_measure_layers_reports_bits_groups_and_errors():
    before, after = Model(), quantized()
    result = measure_layers(loaded(before), loaded(after))
    assert set(result) == {"embed", "layers.0", "layers.1"}
    assert result["embed"] == {"bits": 16, "group_size": None, "error": 0.0}
    shown = [(v["bits"], v["group_size"]) for k, v in result.items() if "layers" in k]
    assert sorted(shown) == [(3, 32), (4, 16)]
    for number, layer in enumerate(after.layers):
        weight = np.array(before.layers[number].weight, np.float64)
        tensors = [layer.weight, layer.scales, layer.get("biases")]
        kind = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        moved = np.array(mx.dequantize(*tensors, **kind).astype(mx.float32), np.float64)
        expected = ((moved - weight) ** 2).sum() / (weight**2).sum()
        assert result[f"layers.{number}"]["error"] == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-3


@pytest.mark.parametrize("what", ["norm.weight", "layers.0.bias"])
def test_measure_layers_has_no_error_if_other_tensors_changed(what):
    """For example after scales are folded: the weights are not comparable."""
    after = quantized()
    path, _, name = what.rpartition(".")
    module = dict(after.named_modules())[path]
    module[name] = module[name] * 2 + 1
    result = measure_layers(loaded(Model()), loaded(after))
    assert {layer["error"] for layer in result.values()} == {None}
    assert result["layers.0"]["bits"] == 3
