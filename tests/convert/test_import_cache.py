"""Imported checkpoints: the convert command, the cache, recipes and training."""

import json

import numpy as np
import pytest
import yaml
from lmx.cli import main
from lmx.convert.importers import resolve_checkpoint
from lmx.data import cache
from packers import gptq, random_codes, write_checkpoint

SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.fixture
def checkpoint(make_checkpoint, tmp_path):
    rng = np.random.default_rng(0)

    def make_codes(_, outputs, inputs):
        return random_codes(rng, outputs, inputs, bits=4, size=32, symmetric=True)

    base = make_checkpoint(tie_word_embeddings=False)
    return write_checkpoint(
        base, tmp_path / "foreign", make_codes, lambda c: gptq(c, 4), SETTINGS
    )


def test_convert_command_writes_a_folder(checkpoint, tmp_path, capsys):
    target = tmp_path / "target"
    template = checkpoint.folder / "additional_chat_templates/tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    (checkpoint.folder / "chat_template.jinja").write_text("{{ messages }}")
    assert main.main(["convert", str(checkpoint.folder), str(target)]) == 0
    assert (target / "additional_chat_templates/tool_use.jinja").is_file()
    assert "parameters" in capsys.readouterr().out
    config = json.loads((target / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    assert "quant_method" not in config["quantization_config"]
    assert (target / "tokenizer.json").is_file()
    generate = ["generate", str(target), "--prompt", "the", "--max-tokens", "3"]
    assert main.main(generate) == 0


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("no/where/at/all", "target", "there is no such folder"),
        ("dense", "target", "has no supported format"),
        ("foreign", "existing", "the target exists"),
    ],
)
def test_convert_command_refuses_invalid_arguments(
    checkpoint, tmp_path, capsys, source, target, message
):
    (tmp_path / "existing").mkdir()
    names = {"foreign": checkpoint.folder, "dense": checkpoint.dense}
    argv = ["convert", str(names.get(source, source)), str(tmp_path / target)]
    assert main.main(argv) == 2
    assert message in capsys.readouterr().err


def test_failed_import_leaves_no_files(checkpoint, tmp_path, capsys):
    checkpoint.folder.joinpath("model.safetensors").write_bytes(b"")
    assert main.main(["convert", str(checkpoint.folder), str(tmp_path / "target")]) == 2
    assert not (tmp_path / "target").exists()


def test_import_is_cached_until_the_source_changes(checkpoint):
    folder = resolve_checkpoint(checkpoint.folder)
    assert folder.is_relative_to(cache.root())
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_checkpoint(checkpoint.folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    # An MLX checkpoint is used in place.
    assert resolve_checkpoint(folder) == folder
    config = checkpoint.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 9e4}))
    assert resolve_checkpoint(checkpoint.folder) != folder


def write_recipe(tmp_path, model, *stages):
    examples = [
        {"prompt": f"Add {n} and 1.", "completion": str(n + 1)} for n in range(40)
    ]
    text = "\n".join(map(json.dumps, examples))
    (tmp_path / "rows.jsonl").write_text(text)
    path = tmp_path / "recipe.yaml"
    config = {
        "model": str(model),
        "output": str(tmp_path / "out"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_seq_length": 64},
        "stages": list(stages),
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_adapter_trains_on_imported_checkpoint(checkpoint, tmp_path, capsys):
    train = {"steps": 3, "batch_size": 4, "learning_rate": 1e-3, "adapter": {"rank": 4}}
    validate = {"num_tokens": 300, "exact_match": {"samples": 2}, "latency_tokens": 8}
    stages = {"train": train}, {"evaluate": validate}
    path = write_recipe(tmp_path, checkpoint.folder, *stages)
    assert main.train([path, "--dry-run"]) == 0
    assert main.train([path, "--quiet"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["models"]) == 2


def test_imported_checkpoint_is_not_requantized(checkpoint, tmp_path, capsys):
    path = write_recipe(tmp_path, checkpoint.folder, {"quantize": {"bits": 4}})
    assert main.train([path]) == 2
    assert "the model is already quantized here" in capsys.readouterr().err
