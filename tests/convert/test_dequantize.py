"""`lmx convert --dequantize`: dense checkpoints of quantized ones."""

import json

import mlx.core as mx
import numpy as np
import pytest
from exporting import quantized_checkpoint
from lmx.cli import main
from lmx.config.quant_spec import QuantSpec
from lmx.models.loader import load
from mlx.utils import tree_flatten
from test_gguf_import import make_gguf  # noqa: F401

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def quantized(make_checkpoint, tmp_path):
    base = make_checkpoint()
    weight = load(base).model.layers[0].mlp.up_proj.weight
    spec = QuantSpec(bits=3, group_size=32)
    codes = dict(
        zip(("weight", "scales", "biases"), mx.quantize(weight, 32, 3), strict=True)
    )
    return quantized_checkpoint(base, tmp_path / "codes", {UP: (codes, spec)})


def weights_of(folder):
    model = load(folder, compute="stored").model
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("dtype", ["exact", "float32"])
def test_dequantize_writes_the_weights_of_the_codes(quantized, tmp_path, dtype):
    target = tmp_path / "dense"
    arguments = ["convert", str(quantized), str(target), "--dequantize"]
    assert main.main([*arguments, "--dtype", dtype]) == 0
    config = json.loads((target / "config.json").read_text())
    assert "quantization" not in config
    dense, codes = weights_of(target), load(quantized, compute="stored").model
    layer = codes.layers[0].mlp.up_proj
    parts = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
    expected = mx.dequantize(layer.weight, *parts, group_size=32, bits=3)
    expected_dtype = mx.float16 if dtype == "exact" else mx.float32
    assert {value.dtype for value in dense.values()} == {expected_dtype}
    assert np.array_equal(dense[f"{UP}.weight"], expected.astype(expected_dtype))
    norm = "model.norm.weight"
    assert np.array_equal(dense[norm], weights_of(quantized)[norm])


def test_dequantize_expands_a_gguf_file(make_gguf, tmp_path):  # noqa: F811
    path, expected, _ = make_gguf("Q4_0")
    target = tmp_path / "dense"
    arguments = ["convert", str(path), str(target), "--dequantize"]
    assert main.main([*arguments, "--dtype", "float32"]) == 0
    dense = weights_of(target)
    for name, value in expected.items():
        assert np.array_equal(dense[name], value), name
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_dense_model_gets_another_dtype(make_checkpoint, tmp_path):
    """The copy from which an adapter is fused without rounding."""
    base, target = make_checkpoint(), tmp_path / "wide"
    config = json.loads((base / "config.json").read_text()) | {"dtype": "float16"}
    (base / "config.json").write_text(json.dumps(config))
    assert main.main(["convert", str(base), str(target), "--dtype", "float32"]) == 0
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    wide, before = weights_of(target), weights_of(base)
    assert {value.dtype for value in before.values()} == {mx.float16}
    assert {value.dtype for value in wide.values()} == {mx.float32}
    assert all(mx.array_equal(wide[name], value) for name, value in before.items())


def test_dequantize_refuses_a_dense_model(make_checkpoint, tmp_path, capsys):
    target = tmp_path / "dense"
    code = main.main(["convert", str(make_checkpoint()), str(target), "--dequantize"])
    assert code == 2
    assert "this model is not quantized" in capsys.readouterr().err
    assert not target.exists()


def test_convert_of_a_quantized_folder_names_the_option(quantized, tmp_path, capsys):
    assert main.main(["convert", str(quantized), str(tmp_path / "x")]) == 2
    assert "--dequantize expands" in capsys.readouterr().err
