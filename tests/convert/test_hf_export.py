"""Hugging Face exports: mlx-lm loads the same weights from them."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest
from exporting import export, pack_layers, quantized_checkpoint
from lmx.config.quant_spec import QuantizationConfig
from lmx.convert.exporters import hf
from lmx.errors import UserError
from lmx.models.loader import load
from lmx.models.safetensors_io import read_header
from lmx.quantization.target_layers import select_layers
from mlx.utils import tree_flatten
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "state_size": 8,
    "conv_kernel": 3,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
    "tie_word_embeddings": True,
}


def write_quantized(source, target, **settings):
    model = load(source, compute="stored").model
    specs = select_layers(model, QuantizationConfig(**settings)).specs
    return quantized_checkpoint(source, target, pack_layers(source, specs))


@pytest.mark.parametrize(
    "base", [LLAMA, QWEN3_MOE, MAMBA], ids=lambda b: b["model_type"]
)
def test_mlx_lm_reads_the_same_model(make_checkpoint, tmp_path, base):
    source = make_checkpoint(base, dtype="bfloat16")
    export(hf, source, tmp_path / "out")
    expected, _ = mlx_lm.load(str(source))
    exported, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    exported, expected = (
        dict(tree_flatten(m.parameters())) for m in (exported, expected)
    )
    assert exported.keys() == expected.keys()
    for name, value in expected.items():
        assert exported[name].dtype == value.dtype == mx.bfloat16
        assert mx.array_equal(exported[name], value), name
    assert tokenizer.encode("hello")


def test_experts_and_convolutions_have_hugging_face_layout(make_checkpoint, tmp_path):
    export(hf, make_checkpoint(QWEN3_MOE), tmp_path / "experts")
    names = read_header(tmp_path / "experts" / "model.safetensors")
    assert not any("switch_mlp" in name for name in names)
    experts = [n for n in names if re.search(r"layers\.1\.mlp\.experts\.3\.", n)]
    assert sorted(n.split(".")[-2] for n in experts) == [
        "down_proj",
        "gate_proj",
        "up_proj",
    ]
    export(hf, make_checkpoint(MAMBA), tmp_path / "convolutions")
    names = read_header(tmp_path / "convolutions" / "model.safetensors")
    [shape] = {t.shape for n, t in names.items() if n.endswith("conv1d.weight")}
    assert shape == (64, 1, 3)


@pytest.mark.parametrize("base", [LLAMA, QWEN3_MOE], ids=lambda b: b["model_type"])
def test_quantized_layers_are_dequantized(make_checkpoint, tmp_path, base):
    source = make_checkpoint(base, dtype="float32")
    codes = write_quantized(source, tmp_path / "codes", bits=4, group_size=32)
    export(hf, codes, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not any("quantization" in key for key in config)
    expected = mlx_lm.load(str(codes))[0](TOKENS)
    exported = mlx_lm.load(str(tmp_path / "out"))[0](TOKENS)
    assert mx.allclose(exported, expected, rtol=1e-4, atol=1e-4)
    unrounded = mlx_lm.load(str(source))[0](TOKENS)
    assert not mx.allclose(unrounded, expected, rtol=1e-2, atol=1e-2)


def test_unsupported_model_type_is_refused(make_checkpoint, tmp_path):
    source = make_checkpoint(model_type="helium", tie_word_embeddings=False)
    with pytest.raises(UserError, match="export of helium models is not supported"):
        export(hf, source, tmp_path / "out")


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda named: named | {"model.norm.weight": named["model.norm.weight"] + 1},
        lambda named: {k: v for k, v in named.items() if "q_proj" not in k},
        lambda named: named | {"model.more.weight": mx.ones(2)},
        lambda named: {k: v.astype(mx.float32) for k, v in named.items()},
    ],
    ids=["other", "missing", "more", "type"],
)
def test_changed_export_is_refused(make_checkpoint, tmp_path, monkeypatch, corrupt):
    original = hf.unstack_experts
    monkeypatch.setattr(
        hf, "unstack_experts", lambda tensors: corrupt(original(tensors))
    )
    with pytest.raises(UserError, match="differs after reading"):
        export(hf, make_checkpoint(), tmp_path / "out")
