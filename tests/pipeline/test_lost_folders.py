"""A run directory that is deleted, renamed or replaced while a run writes into it."""

import errno
import os
import shutil

import mlx.core as mx
import pytest
from lmx.files import atomic
from lmx.pipeline.export.stage import ExportStage
from lmx.pipeline.quantize.stage import QuantizeStage
from lmx.run import run_dir
from lmx.run.logger import RunLogger
from lmx.training import checkpoint
from lmx.training.step import TrainStep
from tiny_runs import METRICS_ONLY, TRAIN, Run

GPTQ = {"bits": 4, "group_size": 32, "method": "gptq"}
GPTQ |= {"calibration": {"num_tokens": 256, "max_seq_length": 64}}
SHORT = TRAIN | {"steps": 4}
TRAINED = [{"train": SHORT}, {"evaluate": METRICS_ONLY}, "export"]
QUANTIZED = [{"quantize": GPTQ}, "export"]
SENTENCE = "the run directory was deleted or renamed during the run"


def delete(folder):
    shutil.rmtree(folder)


def rename(folder):
    folder.rename(folder.with_name("renamed"))


def replace(folder):
    """Another run has the name now."""
    folder.rename(folder.with_name("renamed"))
    folder.mkdir()
    (folder / "log.txt").write_text("of another run\n")


@pytest.mark.parametrize(
    ("stages", "owner", "name", "call", "loss"),
    [
        (TRAINED, TrainStep, "__call__", 2, delete),
        (TRAINED, TrainStep, "evaluate", 1, replace),
        (TRAINED, checkpoint, "save", 1, rename),
        (TRAINED, mx, "save_safetensors", 1, delete),
        (TRAINED, mx, "save_safetensors", 2, replace),
        (TRAINED, RunLogger, "table", 1, rename),
        (TRAINED, ExportStage, "run", 1, delete),
        (TRAINED, run_dir.RunDir, "complete_stage", 1, replace),
        (TRAINED, run_dir.RunDir, "complete_stage", 3, rename),
        (QUANTIZED, QuantizeStage, "_begin", 1, delete),
        (QUANTIZED, mx, "save_safetensors", 2, replace),
        (QUANTIZED, mx, "load", 9, rename),
    ],
)
def test_a_lost_run_directory_is_one_sentence(
    stages, owner, name, call, loss, base, tmp_path, monkeypatch, capsys
):
    run = Run(tmp_path, *stages, model=base)
    real, calls = getattr(owner, name), 0

    def losing(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            loss(run.output)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, losing)
        assert run() == 1
    assert calls >= call
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "warning" not in line]
    assert errors[0] == f"{run.output}: {SENTENCE}"
    assert len(errors) == 2
    if loss is replace:
        assert (run.output / "log.txt").read_text() == "of another run\n"
        assert [file.name for file in run.output.iterdir()] == ["log.txt"]
        return
    assert not run.output.exists()
    if name == "_begin":
        # The same command starts anew.
        assert run() == 0
        assert (run.output / "model/config.json").is_file()


@pytest.mark.parametrize(
    ("number", "words", "place"),
    [
        (errno.ESTALE, "the server has deleted the folder", "read"),
        (errno.EIO, "the disk reports an input/output error", "write"),
        (errno.EMFILE, "too many open files", "read"),
        (errno.ENOENT, "does not exist, or was deleted", "write"),
    ],
)
def test_errors_of_a_disk_are_one_sentence(
    number, words, place, base, tmp_path, monkeypatch, capsys
):
    run = Run(tmp_path, {"train": SHORT}, model=base)

    def failing(*_, **__):
        raise OSError(number, os.strerror(number), "/some/file")

    with monkeypatch.context() as patch:
        owner, name = (TrainStep, "__call__") if place == "read" else (atomic, "_sync")
        patch.setattr(owner, name, failing)
        # A run directory that cannot be opened is an error of its name.
        assert run() == (1 if place == "read" else 2)
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 2
    assert run() == 0
