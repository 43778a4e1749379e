"""Runs whose model is a GGUF file, or was quantized to its blocks."""

import json
import shutil

import mlx.core as mx
import pytest
from lmx.config.quant_spec import QuantSpec
from lmx.convert.gguf import k_blocks
from lmx.convert.gguf.writer import write
from lmx.models import gguf_scales
from lmx.models.loader import load
from lmx.quantization.packing import pack
from tiny_runs import TRAIN, Run


def test_exports_of_a_gguf_model_name_its_class_and_a_base_that_loads(tmp_path, base):
    file = tmp_path / "tiny.gguf"
    write(file, load(base, compute="stored"), name="tiny")
    train = TRAIN | {"adapter": {"rank": 4}, "steps": 2}
    export = {"formats": ["mlx", "hf", "peft"]}
    run = Run(tmp_path, {"train": train}, {"export": export}, model=file)
    assert run() == 0
    for name in ("model", "hf"):
        config = run.json(f"{name}/config.json")
        assert config["architectures"] == ["LlamaForCausalLM"]
    adapter = run.json("adapters/adapter_config.json")
    peft = run.json("peft/adapter_config.json")
    assert adapter["model"] == peft["base_model_name_or_path"]
    imported = load(peft["base_model_name_or_path"], adapter=run.output / "adapters")
    assert imported.config["model_type"] == "llama"
    assert json.loads((imported.path / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("mode", ["q6_k", pytest.param("q3_k", marks=pytest.mark.slow)])
def test_a_stage_warns_of_a_model_in_dense_blocks(make_checkpoint, tmp_path, mode):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
    source = make_checkpoint(dtype="float32", **sizes)
    assert not k_blocks.count_layers(source)
    folder = shutil.copytree(source, tmp_path / "blocks")
    weights = mx.load(str(source / "model.safetensors"))
    spec = QuantSpec(mode=mode)
    matrices = {name for name, value in weights.items() if value.ndim == 2}
    for name in matrices:
        packed = pack(weights[name], spec, mx.float16)
        path = name.removesuffix("weight")
        weights |= {f"{path}{leaf}": value for leaf, value in packed.items()}
    gguf_scales.write(folder, gguf_scales.take(weights))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    assert k_blocks.count_layers(folder) == {mode.upper(): len(matrices)}
    run = Run(tmp_path, {"quantize": {"method": "rtn", "bits": 4}}, model=folder)
    assert run() == 0
    text = f"{len(matrices)} dense layers of the model were quantized to {mode.upper()}"
    assert text in run.log
