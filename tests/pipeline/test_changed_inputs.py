"""A run does not take results of other models or data for its own."""

import os
import shutil

import lmx
import mlx.core as mx
import pytest
from lmx.cli import main
from lmx.errors import UserError
from lmx.files.hashes import hash_folder
from tiny_runs import METRICS_ONLY, TRAIN, Run, negate, write_examples

SHORT = TRAIN | {"steps": 4}
LORA = {"adapter": {"type": "lora", "rank": 4}}
GRID = {"bits": 4, "group_size": 32}
CHANGED = "changed since this run started: "


@pytest.fixture
def model(tmp_path, base):
    return shutil.copytree(base, tmp_path / "ip")


def test_finished_quantization_of_another_model_is_refused(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = ["quantize", "--model", "ip", "--bits", "4", "--group-size", "32"]
    assert main.main(command) == 0
    [output] = (tmp_path / "exports").iterdir()
    negate(model)
    before = hash_folder(output)
    capsys.readouterr()
    for flags in (["--dry-run"], []):
        assert main.main([*command, *flags]) == 2
        captured = capsys.readouterr()
        assert f"{CHANGED}model (ip)\n" in captured.err
        assert "--restart" in captured.err
        assert "already complete" not in captured.out
    with pytest.raises(UserError, match=CHANGED):
        lmx.quantize("ip", bits=4, group_size=32, output=output)
    # What was published is as it was.
    assert hash_folder(output) == before
    assert main.main([*command, "--restart"]) == 0
    after = (output / "model/model.safetensors").read_bytes()
    assert (
        after
        != (output.with_name(f"{output.name}.old-1") / "model")
        .joinpath("model.safetensors")
        .read_bytes()
    )
    # The same model by another time is the same.
    shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(model)
    shutil.copytree(tmp_path / "copy", model)
    assert main.main(command) == 0
    assert "already complete" in capsys.readouterr().out


def rewrite_rows(file):
    write_examples(file, 3, 40)


def rewrite_template(file):
    file.write_text(file.read_text().replace("{% for", "{%  for", 1))


def rewrite_weights(file):
    negate(file.parent)


def rewrite_adapter(file):
    weights = {name: value + 1 for name, value in mx.load(str(file)).items()}
    mx.save_safetensors(str(file), weights)


def test_finished_training_on_other_files_is_refused(
    model, base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    first = Run(tmp_path, {"train": SHORT | LORA}, model=model)
    assert first() == 0
    os.rename(first.output / "adapters", "adapter")
    shutil.rmtree(first.output)
    shutil.copytree(base, "teacher")
    adapter = LORA["adapter"] | {"init_from": "adapter"}
    train = SHORT | {"adapter": adapter, "teacher": {"model": "teacher"}}
    run = Run(tmp_path, {"train": train}, "export", model=model)
    assert run() == 0
    assert run() == 0
    before = hash_folder(run.output)
    capsys.readouterr()
    for path, change, name in (
        ("train.jsonl", rewrite_rows, "data.train ("),
        ("ip/tokenizer_config.json", rewrite_template, "model ("),
        ("ip/model.safetensors", rewrite_weights, "model ("),
        ("teacher/model.safetensors", rewrite_weights, "teacher.model ("),
        ("adapter/adapters.safetensors", rewrite_adapter, "adapter.init_from ("),
    ):
        file = tmp_path / path
        content = file.read_bytes()
        change(file)
        for arguments in (["--dry-run"], [], ["stages.2.export.formats=[mlx, hf]"]):
            assert run(*arguments) == 2
            captured = capsys.readouterr()
            assert f"{CHANGED}{name}" in captured.err
            assert "already complete" not in captured.out
        with pytest.raises(UserError, match=CHANGED):
            lmx.train(run.recipe, output=run.output)
        assert hash_folder(run.output) == before
        file.write_bytes(content)
    # No report compares a new base with an old model.
    negate(model)
    run.stages.append({"evaluate": METRICS_ONLY | {"thresholds": {"max_kl": 5.0}}})
    run.write()
    assert run() == 2
    assert f"{CHANGED}model (" in capsys.readouterr().err
    assert not (run.output / "report.json").exists()


def test_later_stage_with_other_files_runs_again(model, tmp_path, capsys):
    """As with a changed recipe: what is before the change stays."""
    stages = {"quantize": GRID}, {"evaluate": METRICS_ONLY}, "export"
    run = Run(tmp_path, *stages, model=model)
    assert run() == 0
    before = (run.output / "stages/1-quantize/model/model.safetensors").stat()
    report = run.json("report.json")
    write_examples(run.folder / "valid.jsonl", 200, 12)
    assert run("--dry-run") == 0
    assert capsys.readouterr().out.count("already complete") == 1
    assert run() == 0
    note = f"files have changed (data.valid ({run.data['valid'][0]}): other content)"
    assert f"{note}: kept: 1-quantize; to run: 2-evaluate, 3-export" in run.log
    assert run.json("report.json") != report
    after = (run.output / "stages/1-quantize/model/model.safetensors").stat()
    assert before.st_mtime_ns == after.st_mtime_ns
    assert run() == 0
    assert run.log.count("already complete, skipping") == 4


def test_places_and_times_of_files_do_not_matter(model, tmp_path, monkeypatch):
    """The same run by other relative paths, and with files from a backup."""
    run = Run(tmp_path, {"train": SHORT}, model=model)
    assert run() == 0
    shutil.copytree(model, tmp_path / "copy")
    for folder in (model, tmp_path):
        for file in folder.iterdir():
            os.utime(file, (1e9, 1e9))
    monkeypatch.chdir(tmp_path / "copy")
    assert run() == 0
    assert run.log.count("already complete, skipping") == 1


REWARD = """
def reward(prompt, completion, answer):
    return float(len(completion){})
"""


def test_finished_training_with_another_reward_file_is_refused(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD.format(""))
    loss = {"type": "grpo", "rewards": ["reward.py:reward"]}
    rollouts = {"num_generations": 2, "max_tokens": 4}
    train = SHORT | {"steps": 1, "batch_size": 1, "loss": loss, "rollouts": rollouts}
    run = Run(tmp_path, {"train": train}, model=model)
    assert run("--allow-python") == 0
    assert run("--allow-python") == 0
    (tmp_path / "reward.py").write_text(REWARD.format(" + 1"))
    assert run("--allow-python") == 2
    assert f"{CHANGED}loss.rewards (reward.py)" in capsys.readouterr().err
