"""What users and disks can do to a run: one clear message each, nothing half-done."""

import json
import resource
import shutil
from contextlib import contextmanager

import pytest
from tiny_runs import TRAIN, VALIDATE, Run


def fails(run, capsys, code, *arguments) -> str:
    """What a run that must fail says."""
    capsys.readouterr()
    assert run(*arguments) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert not (run.output / "model").exists()
    assert not run.half_written()
    return said


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, {"train": TRAIN}, {"evaluate": VALIDATE}, "export")


def test_empty_file(run, capsys):
    path = run.folder / "train.jsonl"
    path.write_text("\n\n")
    said = fails(run, capsys, 2)
    assert said.startswith(f"{path}: the source has no examples")


def test_broken_json(run, capsys):
    path = run.folder / "train.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:-2]
    path.write_text("\n".join(lines))
    said = fails(run, capsys, 2)
    assert said.startswith(f"{path}:5: line 5 is not JSON: ")
    assert run.json("manifest.json")["status"] == "failed"


def test_missing_file(run, capsys):
    (run.folder / "valid.jsonl").unlink()
    said = fails(run, capsys, 2)
    assert "tiny.yaml:" in said
    assert "no such file or folder" in said
    assert "valid.jsonl" in said
    assert not run.output.exists()


def test_records_of_unknown_format(run, capsys):
    (run.folder / "train.jsonl").write_text('{"frage": "1 + 1", "antwort": "2"}\n')
    said = fails(run, capsys, 2)
    assert "no dataset format matches the keys frage, antwort" in said


def test_records_too_long_for_the_model(run, capsys):
    run.data["max_seq_length"] = 8
    run.write()
    said = fails(run, capsys, 2)
    assert "nothing to train on: all 40 examples were skipped" in said
    assert "raise data.max_seq_length" in said


def with_model(tmp_path, model, *stages):
    return Run(tmp_path, *(stages or ({"train": TRAIN},)), model=model)


def test_folder_without_model(tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    run = with_model(tmp_path, tmp_path / "nothing")
    said = fails(run, capsys, 2)
    assert "is not a model: it has no config.json" in said
    assert not run.output.exists()


@pytest.fixture
def model(tmp_path, base):
    """A copy of a good model, to break."""
    return shutil.copytree(base, tmp_path / "model")


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_unknown_architecture(tmp_path, model, capsys):
    change(model / "config.json", model_type="gpt17", architectures=["GPT17"])
    said = fails(with_model(tmp_path, model), capsys, 2)
    assert "mlx-lm has no model type 'gpt17'" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 64}', "\x00"])
def test_invalid_config_json(tmp_path, model, capsys, text):
    (model / "config.json").write_text(text)
    for flags in ((), ("--dry-run",), ("--ignore-limits",)):
        said = fails(with_model(tmp_path, model), capsys, 2, *flags)
        assert str(model / "config.json") in said


def test_pickles_only(tmp_path, model, capsys):
    for file in model.glob("model*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    said = fails(with_model(tmp_path, model), capsys, 2)
    assert "only pickles (pytorch_model.bin), which" in said


def test_weights_cut_short(tmp_path, model, capsys):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    said = fails(with_model(tmp_path, model), capsys, 2)
    assert "cut short" in said
    assert str(model) in said


def test_no_tokenizer(tmp_path, model, capsys):
    (model / "tokenizer.json").unlink()
    said = fails(with_model(tmp_path, model), capsys, 2)
    assert "the tokenizer does not load" in said


def test_adapter_on_missing_layers(tmp_path, base, capsys):
    adapter = {"target_modules": ["attention.query"]}
    run = with_model(tmp_path, base, {"train": TRAIN | {"adapter": adapter}})
    said = fails(run, capsys, 2)
    assert "no layer that lora adapts here matches 'attention.query'" in said
    assert "self_attn.q_proj" in said


def test_group_size_that_does_not_fit(tmp_path, capsys):
    train = TRAIN | {"qat": {"group_size": 128}}
    run = Run(tmp_path, {"train": train})
    said = fails(run, capsys, 2)
    assert "no layer of this model can be quantized" in said
    assert "its width 64 is not a multiple of 128" in said


def test_excessive_learning_rate_stops_with_nan(run, capsys):
    arguments = ("stages.1.train.learning_rate=1e30", "stages.1.train.warmup_ratio=0")
    said = fails(run, capsys, 1, *arguments)
    assert "the loss or its gradient is NaN or infinite at step" in said
    assert f"{run.folder / 'train.jsonl'}:" in said
    record = run.json("stages/1-train/nan_batch.json")
    assert f"at step {record['step']}" in said
    assert len(record["examples"]) == 8
    assert run.json("manifest.json")["status"] == "failed"


@contextmanager
def files_limited_to(size):
    """A disk with room for `size` bytes a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_disk_full_while_training(run, whole, capsys):
    # The model fits, the checkpoint with its moments does not.
    with files_limited_to(500_000):
        said = fails(run, capsys, 1)
    assert "cannot write" in said
    assert "checkpoints/0000002" in said
    assert "free some space" in said
    assert run.json("manifest.json")["status"] == "failed"
    assert list((run.output / "stages/1-train").glob("checkpoints/*")) == []
    assert run() == 0


def test_disk_full_while_writing_the_model(tmp_path, base, capsys):
    run = with_model(tmp_path, base, {"quantize": {"bits": 8}}, "export")
    with files_limited_to(60_000):
        said = fails(run, capsys, 1)
    assert "cannot write" in said
    assert not (run.output / "stages/1-quantize/model").exists()
    assert run() == 0


def test_output_below_a_file(run, capsys):
    (run.folder / "file").write_text("")
    run.output = run.folder / "file" / "out"
    said = fails(run, capsys, 1)
    assert "cannot write: a part of the path is a file, not a folder" in said


def test_output_that_is_not_a_run_directory(run, capsys):
    run.output.mkdir()
    (run.output / "thesis.tex").write_text("years of work")
    for flags in ((), ("--restart",)):
        said = fails(run, capsys, 2, *flags)
        assert "not a run directory of lmx: it has thesis.tex" in said
    assert [p.name for p in run.output.iterdir()] == ["thesis.tex"]
