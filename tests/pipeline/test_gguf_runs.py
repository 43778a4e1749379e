"""Runs whose model is a GGUF file."""

import json

import pytest
from lmx.convert.gguf.writer import write
from lmx.models.loader import load
from tiny_runs import TRAIN, Run

pytest.importorskip("gguf")


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
