"""The export stage publishes all formats or none, and refuses early."""

import json
import os
import re
import shutil

import mlx.core as mx
import pytest
from damaged_safetensors import damage as damage_file
from huggingface_hub import ModelCard
from lmx.convert.exporters import hf
from lmx.convert.importers import load_model as load
from lmx.errors import UserError
from lmx.pipeline.context import ModelArtifact
from tiny_runs import EVALUATE, METRICS_ONLY, TRAIN, Run

LORA = {"adapter": {"rank": 4}, "steps": 4, "learning_rate": 1e-2}
FORMATS = ["mlx", "hf", "peft", "gguf"]
TOKENS = mx.array([[5, 80, 200, 7, 33, 120]])


@pytest.fixture(scope="module")
def published(tmp_path_factory, base):
    stages = {"train": TRAIN | LORA}, {"export": {"formats": FORMATS}}
    run = Run(tmp_path_factory.mktemp("formats"), *stages, model=base)
    assert run() == 0
    return run


def test_every_export_format_is_the_same_model(published):
    expected = load(published.output / "model").model(TOKENS)
    for folder in ("hf", "gguf"):
        logits = load(published.output / folder).model(TOKENS)
        assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4), folder
    assert (published.output / "gguf" / "tiny.gguf").is_file()
    assert (published.output / "peft" / "adapter_model.safetensors").is_file()
    modelfile = (published.output / "gguf" / "Modelfile").read_text()
    assert modelfile.startswith("FROM ./tiny.gguf\n")
    assert "PARAMETER stop" in modelfile
    for name in FORMATS:
        assert f"exported {name}:" in published.log


def test_all_chat_templates_are_exported(tmp_path, base):
    model = shutil.copytree(base, tmp_path / "model")
    files = {"chat_template.jinja": "{{ messages }}"}
    files["additional_chat_templates/tool_use.jinja"] = "{{ messages }}{{ tools }}"
    for name, text in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    names = [{"name": name, "template": "{{ messages }}"} for name in ("default", "b")]
    settings |= {"chat_template": names}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    quantize = {"quantize": {"bits": 4, "group_size": 32}}
    run = Run(tmp_path, quantize, {"export": {"formats": ["mlx", "hf"]}}, model=model)
    assert run() == 0
    for folder in ("stages/1-quantize/model", "model", "hf"):
        for name in [*files, "tokenizer_config.json"]:
            written = (run.output / folder / name).read_bytes()
            assert written == (model / name).read_bytes(), folder


def tried(log):
    """The commands that the run suggests at its end."""
    return re.findall("try it: (.*)", log)


def test_run_ends_with_a_command_for_the_new_model(published, full_run, tmp_path, base):
    # With the first prompt that the recipe shows answers of.
    assert tried(full_run.log)[0].endswith("/model --prompt 'Add 1 and 1.'")
    before = len(published.log)
    assert published() == 0
    command = f'lmx generate {published.output}/model --prompt "..."'
    # Also a run whose stages were all complete.
    assert tried(published.log) == [command] * 2
    assert tried(published.log[before:]) == [command]
    lines = published.log.splitlines()
    for line, start in zip(lines[-3:], ("done", "try it", "serve it"), strict=True):
        assert f" {start}: " in line
    assert lines[-1].endswith(f"lmx serve {published.output}/model")
    hf = {"export": {"formats": ["hf"]}}
    for stages, name in ((["export", hf], "model"), ([hf], "hf")):
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name, *stages, model=base)
        assert run() == 0
        assert tried(run.log) == [f'lmx generate {run.output}/{name} --prompt "..."']
    # Else with the first question of the evaluation.
    (tmp_path / "asked").mkdir()
    evaluate = {"evaluate": METRICS_ONLY | {"num_samples": 1, "max_tokens": 4}}
    run = Run(tmp_path / "asked", evaluate, "export", model=base)
    assert run() == 0
    assert tried(run.log)[0].endswith("/model --prompt 'Add 100 and 2.'")


def test_result_of_a_run_is_its_newest_model(tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    stage = out / "stages/1-train/dense"

    def result(model, *published, **paths):
        folders = tuple(out / name for name in published)
        artifact = ModelArtifact(model, base, published=folders, **paths)
        return artifact.result_in(out)

    assert result(stage) == stage
    assert result(out / "model", "hf", "model") == out / "model"
    assert result(stage, "gguf", "hf") == out / "hf"
    assert result(stage, "peft") == stage
    assert result(base, "gguf") == out / "gguf"
    # An evaluation leaves no new model.
    assert result(base) is None


def test_exported_weights_are_links_to_those_of_the_stage(published, base):
    name = "model.safetensors"
    stage = published.output / "stages/1-train/dense"
    exported = published.output / "model" / name
    assert exported.samefile(stage / name)
    assert not (exported.parent / "config.json").samefile(stage / "config.json")
    # Not with the model of the recipe, whose files are the user's.
    for folder in (published.output / "model", published.output / "hf"):
        for file in folder.iterdir():
            assert not (base / file.name).exists() or not file.samefile(
                base / file.name
            )


def test_every_export_format_has_a_model_card(published, base):
    for folder, library, suffix in [
        ("model", "mlx", ""),
        ("hf", "transformers", ""),
        ("peft", "peft", "-lora"),
        ("gguf", None, "-GGUF"),
    ]:
        card = ModelCard.load(published.output / folder / "README.md")
        assert card.data.library_name == library
        assert f"# {base.name}-finetuned{suffix}\n" in card.content


def test_card_of_a_qat_run_names_bits_and_method(tmp_path, base):
    train = TRAIN | {"steps": 1, "qat": {"bits": 3, "group_size": 32}}
    run = Run(tmp_path, {"train": train}, {"export": None}, model=base)
    assert run() == 0
    card = ModelCard.load(run.output / "model" / "README.md")
    assert f"# {base.name}-3bit-qat\n" in card.content
    assert card.data.tags == ["mlx", "lmx", "3-bit", "qat"]


def test_exports_are_hashed_in_the_manifest(published):
    artifacts = published.json("manifest.json")["stages"]["2-export"]["artifacts"]
    assert {"model", "hf", "peft", "gguf"} <= artifacts.keys()
    before = len(published.log)
    (published.output / "gguf" / "tiny.gguf").write_bytes(b"other")
    assert published() == 0
    assert "gguf is damaged or missing" in published.log[before:]
    load(published.output / "gguf")


def test_failed_verification_publishes_no_format(tmp_path, base, monkeypatch):
    unstack_experts = hf.unstack_experts
    monkeypatch.setattr(
        hf,
        "unstack_experts",
        lambda t: unstack_experts({n: v + 1 for n, v in t.items()}),
    )
    run = Run(tmp_path, {"export": {"formats": ["mlx", "hf"]}}, model=base)
    assert run() == 1
    assert not (run.output / "model").exists()
    assert not (run.output / "hf").exists()
    assert not run.partial_files()


def test_training_continues_from_an_exported_adapter(published, tmp_path, base):
    """The first validation loss is that of the adapter, in the MLX and PEFT formats."""
    before = [r["loss"] for r in published.records() if r["kind"] == "valid"]
    for format_name in ("adapters", "peft"):
        start = str(published.output / format_name)
        train = TRAIN | LORA | {"adapter": {"rank": 6, "init_from": start}}
        (tmp_path / format_name).mkdir()
        run = Run(tmp_path / format_name, {"train": train | {"steps": 1}}, model=base)
        assert run() == 0
        [first, *_] = [r["loss"] for r in run.records() if r["kind"] == "valid"]
        assert first == pytest.approx(before[-1], rel=1e-3)
        assert first < before[0] - 0.01


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def test_training_does_not_continue_from_nan(published, base, tmp_path, capsys):
    adapter = shutil.copytree(published.output / "adapters", tmp_path / "adapter")
    file = adapter / "adapters.safetensors"
    tensors = mx.load(str(file))
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    mx.save_safetensors(str(file), tensors)
    train = TRAIN | LORA | {"adapter": {"rank": 4, "init_from": str(adapter)}}
    train["qat"] = {"mode": "mxfp4", "bits": 4, "group_size": 32}
    assert Run(tmp_path, {"train": train}, model=base)() == 1
    message = f"{file}: the tensor {name} has values that are NaN or infinite"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (as_pipe, "adapters"),
        (lambda file: damage_file(file, "overlap"), "peft"),
    ],
)
def test_damaged_adapter_is_refused(published, base, tmp_path, damage, kind):
    adapter = shutil.copytree(published.output / kind, tmp_path / "adapter")
    [file] = adapter.glob("*.safetensors")
    damage(file)
    with pytest.raises(UserError):
        load(base, adapter=adapter)
    export = {"formats": ["peft"], "adapter_path": str(adapter)}
    assert Run(tmp_path, {"export": export}, model=base)() == 2


@pytest.mark.parametrize(
    ("formats", "changes", "message"),
    [
        (["peft"], {}, "there is no trained adapter"),
        (["mlx", "mlx"], {}, "formats has duplicates"),
        (["hf"], {"model_type": "helium"}, "export of helium models is not supported"),
        (
            ["gguf"],
            {"model_type": "helium"},
            "GGUF export of helium models is not supported",
        ),
        (["onnx"], {}, "onnx"),
    ],
)
def test_unsupported_export_is_refused_before_training(
    tmp_path, make_checkpoint, capsys, formats, changes, message
):
    stages = {"evaluate": EVALUATE}, {"export": {"formats": formats}}
    run = Run(tmp_path, *stages, model=make_checkpoint(**changes))
    assert run("--dry-run") == 2
    assert message in capsys.readouterr().err
