"""MLX exports: files and config keys that mlx-lm, LM Studio and mlx-swift read."""

import json
import math
import shutil

import mlx.core as mx
import mlx_lm
import pytest
from exporting import pack_layers, write_quantized
from lmx.config.quant_spec import QuantizationConfig, QuantSpec
from lmx.models import checkpoint_writer
from lmx.models.checkpoint import checkpoint_size
from lmx.models.loader import load
from lmx.models.safetensors_io import read_header
from lmx.quantization.target_layers import QuantizationPlan, select_layers
from mlx_lm.utils import compute_bits_per_weight, get_total_parameters
from tiny_checkpoints import LLAMA, QWEN3_MOE

TOKENS = mx.random.randint(0, 320, (2, 9), key=mx.random.key(0))
SMALL = QuantSpec(bits=3, group_size=32)
BIG = QuantSpec(bits=8, group_size=128)
FLOAT = QuantSpec(mode="nvfp4")


def export(source, target, plan=None):
    """Write a checkpoint and quantize the layers of the plan; returns its tensors."""
    plan = plan or QuantizationPlan({}, {})
    packed = pack_layers(source, plan.specs)
    return write_quantized(source, target, packed, kept=plan.skipped)


def mixed_plan(folder):
    """Return a plan with four specs and one unquantized layer."""
    model = load(folder, compute="stored").model
    specs = select_layers(model, QuantizationConfig(bits=3, group_size=32)).specs
    specs |= {"model.embed_tokens": BIG, "model.layers.0.mlp.up_proj": FLOAT}
    specs |= {"model.layers.0.self_attn.o_proj": QuantSpec(mode="mxfp8")}
    del specs["model.layers.1.mlp.up_proj"]
    return QuantizationPlan(
        specs, {"model.layers.1.mlp.up_proj": "excluded by the test"}
    )


@pytest.fixture
def folder(make_checkpoint):
    return make_checkpoint(num_hidden_layers=2, dtype="float32")


def read_json(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def test_unquantized_checkpoint_roundtrip(folder, tmp_path):
    weights = export(folder, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert "quantization" not in read_json(tmp_path / "out")
    assert read_json(tmp_path / "out") == read_json(folder)
    assert list(read_json(tmp_path / "out")) == sorted(read_json(folder))
    tensors, metadata = mx.load(
        str(tmp_path / "out" / "model.safetensors"), return_metadata=True
    )
    assert metadata == {"format": "mlx"}
    assert tensors.keys() == weights.keys()
    assert all(mx.array_equal(tensors[name], weights[name]) for name in weights)


def test_mixed_precision_loads_in_stock_mlx_lm(folder, tmp_path):
    plan = mixed_plan(folder)
    export(folder, tmp_path / "out", plan)
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    modules = dict(stock.named_modules())
    for path, spec in plan.specs.items():
        layer = modules[path]
        layer_spec = (layer.bits, layer.group_size, layer.mode)
        assert layer_spec == (spec.bits, spec.group_size, spec.mode)
    assert not hasattr(modules["model.layers.1.mlp.up_proj"], "bits")
    loaded = load(tmp_path / "out").model
    assert mx.allclose(loaded(TOKENS), stock(TOKENS), rtol=1e-4, atol=1e-4)


def test_quantization_block_fits_mlx_swift(folder, tmp_path):
    """mlx-swift reads no tensor shapes, so the block must list every override."""
    plan = mixed_plan(folder)
    export(folder, tmp_path / "out", plan)
    config = read_json(tmp_path / "out")
    block = config["quantization"]
    assert config["quantization_config"] == block
    default = {"group_size": 32, "bits": 3, "mode": "affine"}
    assert {k: block[k] for k in default} == default
    overrides = {path: value for path, value in block.items() if path not in default}
    assert overrides == {
        "model.embed_tokens": {"group_size": 128, "bits": 8, "mode": "affine"},
        "model.layers.0.mlp.up_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        "model.layers.0.self_attn.o_proj": {
            "group_size": 32,
            "bits": 8,
            "mode": "mxfp8",
        },
        "model.layers.1.mlp.up_proj": False,
    }


def test_quantization_default_is_the_most_frequent_spec():
    specs = {"a": BIG, "b": SMALL, "c": SMALL}
    block = checkpoint_writer.quantization_block(specs, [])
    big = {"group_size": 128, "bits": 8, "mode": "affine"}
    assert block == {"group_size": 32, "bits": 3, "mode": "affine", "a": big}
    reversed_specs = dict(reversed(specs.items()))
    assert checkpoint_writer.quantization_block(reversed_specs, []) == block


@pytest.mark.parametrize("base", [LLAMA, QWEN3_MOE], ids=["llama", "qwen3_moe"])
@pytest.mark.parametrize("quantized", [False, True])
def test_bits_per_weight_equal_mlx_lm(make_checkpoint, tmp_path, base, quantized):
    source = make_checkpoint(base, num_hidden_layers=2, dtype="bfloat16")
    plan = mixed_plan(source) if base is LLAMA else None
    if base is QWEN3_MOE:
        model = load(source, compute="stored").model
        plan = select_layers(
            model, QuantizationConfig(bits=6, overrides={"lm_head": "skip"})
        )
    export(source, tmp_path / "out", plan if quantized else None)
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    sizes = checkpoint_size(tmp_path / "out")
    assert sizes.parameters == get_total_parameters(stock)
    assert sizes.bits_per_weight == pytest.approx(compute_bits_per_weight(stock))
    metadata = read_json(tmp_path / "out", "model.safetensors.index.json")["metadata"]
    assert metadata == {"total_size": sizes.bytes, "total_parameters": sizes.parameters}


def test_large_checkpoints_are_sharded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "SHARD_BYTES", 200_000)
    weights = export(folder, tmp_path / "out")
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [
        f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    ]
    index = read_json(tmp_path / "out", "model.safetensors.index.json")
    assert list(index["weight_map"]) == sorted(weights)
    for file in files:
        tensors = read_header(tmp_path / "out" / file)
        size = sum(math.prod(t.shape) * 4 for t in tensors.values())
        assert size <= 200_000 or len(tensors) == 1
        assert {
            n for n, f in index["weight_map"].items() if f == file
        } == tensors.keys()
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    assert mx.array_equal(stock(TOKENS), mlx_lm.load(str(folder))[0](TOKENS))


COMPANIONS = {
    "spiece.model": b"\x00\x01",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "chat_template.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "merges.txt": b"a b\n",
    "vocab.json": b"{}",
    "special_tokens_map.json": b"{ }",
    "added_tokens.json": b"{}",
}


def test_companion_files_are_copied(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    for name, content in COMPANIONS.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "custom.py").write_text("")
    (source / "README.md").write_text("of another model")
    (source / "chat_templates").mkdir()
    (tmp_path / "out").mkdir()
    checkpoint_writer.write_checkpoint(
        tmp_path / "out", {}, {"model_type": "llama"}, companions=source
    )
    for name in [*COMPANIONS, "tokenizer.json", "generation_config.json"]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()
    assert not (tmp_path / "out" / "custom.py").exists()


@pytest.mark.parametrize("code_source", ["model", "tokenizer"])
def test_model_code_is_copied_if_needed(folder, tmp_path, code_source):
    source = shutil.copytree(folder, tmp_path / "source")
    (source / "custom.py").write_text("x = 1\n")
    (tmp_path / "out").mkdir()
    config = {"model_type": "llama"}
    if code_source == "model":
        config["model_file"] = "custom.py"
    else:
        (source / "tokenizer_config.json").write_text('{"auto_map": {}}')
    checkpoint_writer.write_checkpoint(tmp_path / "out", {}, config, companions=source)
    assert (tmp_path / "out" / "custom.py").read_text() == "x = 1\n"


def test_config_is_valid_json_without_foreign_keys(folder, tmp_path):
    """JSON has no infinity. Hugging Face and mlx-lm write a tagged object."""
    (tmp_path / "out").mkdir()
    config = LLAMA | {
        "quantization": {"bits": 4},
        "quantization_config": {"quant_method": "fp8"},
        "_name_or_path": "/home/somebody/model",
        "vision_config": {"depth": 2},
        "text_config": {"time_step_limit": [0.0, math.inf]},
    }
    checkpoint_writer.write_checkpoint(tmp_path / "out", {}, config, companions=folder)
    config_text = (tmp_path / "out" / "config.json").read_text()
    config = json.loads(config_text, parse_constant=pytest.fail)
    limit = [0.0, {"__float__": "Infinity"}]
    assert config == LLAMA | {"text_config": {"time_step_limit": limit}}


def test_vision_config_is_kept_with_vision_tower(folder, tmp_path):
    (tmp_path / "out").mkdir()
    config = LLAMA | {"vision_config": {"depth": 2}}
    weights = {"model.vision_tower.norm.weight": mx.ones(4)}
    checkpoint_writer.write_checkpoint(
        tmp_path / "out", weights, config, companions=folder
    )
    assert read_json(tmp_path / "out")["vision_config"] == {"depth": 2}
