"""User errors and full disks: one clear message each, and no partial files."""

import resource
import shutil
from contextlib import contextmanager

import damaged_safetensors
import mlx.core as mx
import pytest
from lmx.cli import main
from tiny_runs import EVALUATE, TRAIN, Run


def error_of(run, capsys, code, *arguments) -> str:
    """The error message of a run that must fail with exit code `code`."""
    capsys.readouterr()
    assert run(*arguments) == code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert not (run.output / "model").exists()
    assert not run.partial_files()
    return error


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, {"train": TRAIN}, {"evaluate": EVALUATE}, "export")


def test_run_refuses_broken_json_after_the_first_records(run, capsys):
    path = run.folder / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines * 6, lines[0][:-2]]))
    error = error_of(run, capsys, 2)
    assert error.startswith(f"{path}:241: line 241 is not JSON: ")
    assert run.json("manifest.json")["status"] == "failed"


def test_run_refuses_records_that_are_all_too_long(run, capsys):
    run.data["max_seq_length"] = 8
    run.write()
    error = error_of(run, capsys, 2)
    assert "nothing to train on: all 40 examples were skipped" in error
    assert "raise data.max_seq_length" in error


def make_run(tmp_path, model, *stages):
    return Run(tmp_path, *(stages or ({"train": TRAIN},)), model=model)


def test_run_refuses_a_folder_without_model(tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    run = make_run(tmp_path, tmp_path / "nothing")
    error = error_of(run, capsys, 2)
    assert "is not a model: it has no config.json" in error
    assert not run.output.exists()


@pytest.fixture
def model(tmp_path, base):
    """A copy of a valid model that a test can damage."""
    return shutil.copytree(base, tmp_path / "model")


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 64}', "\x00"])
def test_run_refuses_an_invalid_config_json(tmp_path, model, capsys, text):
    (model / "config.json").write_text(text)
    for flags in ((), ("--ignore-limits",)):
        error = error_of(make_run(tmp_path, model), capsys, 2, *flags)
        assert str(model / "config.json") in error


def test_run_refuses_pickled_weights(tmp_path, model, capsys):
    for file in model.glob("model*"):
        file.unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    error = error_of(make_run(tmp_path, model), capsys, 2)
    assert "only pickles (pytorch_model.bin), which" in error


STAGES = {
    "full": {"train": TRAIN},
    "adapter": {"train": TRAIN | {"adapter": {"rank": 4}}},
    "quantize": {"quantize": {"bits": 4}},
    "export": "export",
}


@pytest.mark.parametrize(
    ("damage", "stage"),
    [
        *(("overlap", stage) for stage in STAGES),
        ("type of another size", "full"),
        ("cut short", "full"),
    ],
)
def test_run_refuses_damaged_weights(tmp_path, model, capsys, damage, stage):
    file = model / "model.safetensors"
    damaged_safetensors.damage(file, damage)
    run = make_run(tmp_path, model, STAGES[stage])
    error = error_of(run, capsys, 2, "--ignore-limits")
    assert error.startswith(f"{file}: the file is damaged, cut short or none ")


# Grids that give NaN a code: their training would not fail.
GRIDS = [
    {"mode": "mxfp4", "bits": 4, "group_size": 32},
    {"mode": "nvfp4", "bits": 4, "group_size": 16},
    {"mode": "mxfp8", "bits": 8, "group_size": 32},
    {"bits": 4, "group_size": 32},
]


@pytest.mark.parametrize(
    ("value", "stage"),
    [
        ("inf", STAGES["quantize"]),
        *(("nan", stage) for stage in STAGES.values()),
        *(("nan", {"train": TRAIN | {"qat": grid}}) for grid in GRIDS),
    ],
)
def test_run_refuses_weights_that_are_not_finite(tmp_path, model, capsys, value, stage):
    file = model / "model.safetensors"
    weights = mx.load(str(file))
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name][3, 5] = float(value)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    run = make_run(tmp_path, model, stage)
    error = error_of(run, capsys, 1)
    assert f"the tensor {name}" in error
    assert not (run.output / "metrics.jsonl").exists()
    assert "NaN or infinite" in error


def test_generation_refuses_predictions_that_are_not_numbers(model, capsys):
    file = model / "model.safetensors"
    weights = mx.load(str(file))
    weights["model.norm.weight"][0] = float("nan")
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    assert main.main(["generate", str(model), "--prompt", "1 + 1"]) == 1
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("the model's predictions are NaN")


def test_run_refuses_a_model_without_tokenizer(tmp_path, model, capsys):
    (model / "tokenizer.json").unlink()
    error = error_of(make_run(tmp_path, model), capsys, 2)
    assert "the tokenizer does not load" in error


@pytest.mark.parametrize(
    ("train", "messages"),
    [
        (
            {"adapter": {"target_modules": ["attention.query"]}},
            [
                "no layer that lora adapts here matches 'attention.query'",
                "self_attn.q_proj",
            ],
        ),
        (
            {"qat": {"group_size": 128}},
            [
                "no layer of this model can be quantized",
                "its width 64 is not a multiple of 128",
            ],
        ),
    ],
)
def test_run_refuses_layers_that_do_not_exist(tmp_path, base, capsys, train, messages):
    error = error_of(make_run(tmp_path, base, {"train": TRAIN | train}), capsys, 2)
    assert all(message in error for message in messages)


def test_excessive_learning_rate_stops_with_nan(run, capsys):
    arguments = ("stages.1.train.learning_rate=4e9", "stages.1.train.warmup_ratio=0")
    error = error_of(run, capsys, 1, *arguments)
    assert "the loss or its gradient is NaN or infinite at step" in error
    assert f"{run.folder / 'train.jsonl'}:" in error
    record = run.json("stages/1-train/nan_batch.json")
    assert f"at step {record['step']}" in error
    assert len(record["examples"]) == 8
    assert run.json("manifest.json")["status"] == "failed"


@contextmanager
def limit_file_size(size):
    """Limit every file to `size` bytes, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_run_recovers_from_full_disk_in_training(run, full_run, capsys):
    # The model fits; the checkpoint with the optimizer moments does not.
    with limit_file_size(500_000):
        error = error_of(run, capsys, 1)
    assert "cannot write" in error
    assert "checkpoints/0000002" in error
    assert "free some space" in error
    assert run.json("manifest.json")["status"] == "failed"
    assert list((run.output / "stages/1-train").glob("checkpoints/*")) == []
    assert run() == 0


def test_run_recovers_from_full_disk_in_model_write(tmp_path, base, capsys):
    run = make_run(tmp_path, base, {"quantize": {"bits": 8}}, "export")
    with limit_file_size(60_000):
        error = error_of(run, capsys, 1)
    assert "cannot write" in error
    assert not (run.output / "stages/1-quantize/model").exists()
    assert run() == 0


def test_run_refuses_output_below_a_file(run, capsys):
    (run.folder / "file").write_text("")
    run.output = run.folder / "file" / "out"
    error = error_of(run, capsys, 2)
    assert "cannot write: a part of the path is a file, not a folder" in error


def test_run_refuses_a_directory_of_other_files(run, capsys):
    run.output.mkdir()
    (run.output / "thesis.tex").write_text("years of work")
    for flags in ((), ("--restart",)):
        error = error_of(run, capsys, 2, *flags)
        assert "not a run directory of lmx: it has thesis.tex" in error
    assert [p.name for p in run.output.iterdir()] == ["thesis.tex"]
