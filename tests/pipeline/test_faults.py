"""User errors and full disks: one clear message each, and no partial files."""

import resource
import shutil
from contextlib import contextmanager

import damaged_safetensors
import mlx.core as mx
import pytest
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
        ("overlap", "export"),
        ("type of another size", "adapter"),
        ("cut short", "quantize"),
    ],
)
def test_run_refuses_damaged_weights(tmp_path, model, capsys, damage, stage):
    file = model / "model.safetensors"
    damaged_safetensors.damage(file, damage)
    run = make_run(tmp_path, model, STAGES[stage])
    error = error_of(run, capsys, 2, "--ignore-limits")
    assert error.startswith(f"{file}: the file is damaged, cut short or none ")


# A grid that gives NaN a code: its training would not fail.
GRID = {"mode": "mxfp4", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("value", "stage"),
    [
        ("inf", STAGES["quantize"]),
        ("nan", STAGES["full"]),
        ("nan", STAGES["export"]),
        ("nan", {"train": TRAIN | {"qat": GRID}}),
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
    assert "checkpoints/steps/0000002" in error
    assert "free some space" in error
    assert run.json("manifest.json")["status"] == "failed"
    assert list((run.output / "stages/1-train").glob("checkpoints/*/*/content")) == []
    assert run() == 0


def test_run_recovers_from_full_disk_in_model_write(tmp_path, base, capsys):
    run = make_run(tmp_path, base, {"quantize": {"bits": 8}}, "export")
    with limit_file_size(60_000):
        error = error_of(run, capsys, 1)
    assert "cannot write" in error
    assert not (run.output / "stages/1-quantize/model").exists()
    assert run() == 0
