"""`lmx train`, `lmx quantize` and `lmx draft` without a recipe file."""

import json
import os

import lmx
import pytest
from lmx.cli import main
from lmx.run.fs import hash_file

EXTRA = ["stages.train.logging_steps=2", "stages.train.learning_rate=2e-3"]


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint()


@pytest.fixture
def train_words(checkpoint, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"{n + 1}"} for n in range(16)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    options = "--data my.jsonl --lora-rank 4 --bits 4 --steps 2 --batch-size 2"
    return ["--model", str(checkpoint), *options.split(), "--max-seq-length", "64"]


def weights(run: lmx.Run) -> str:
    return hash_file(run.model_path / "model.safetensors")


def test_options_file_and_dict_give_the_same_bytes(
    train_words, checkpoint, tmp_path, capsys
):
    words = [*train_words, *EXTRA, "--quiet"]
    assert main.main(["train", *words]) == 0
    printed = capsys.readouterr().out
    [folder] = (tmp_path / "exports").iterdir()
    text = (folder / "recipe.yaml").read_text()
    assert printed.startswith(text)
    (tmp_path / "same.yaml").write_text(text)
    assert main.train(["same.yaml", "--quiet"]) == 0
    stage = {
        "adapter": {"rank": 4},
        "qat": {"bits": 4},
        "steps": 2,
        "batch_size": 2,
        "logging_steps": 2,
        "learning_rate": 2e-3,
    }
    recipe = {
        "model": checkpoint,
        "data": {"train": "my.jsonl", "max_seq_length": 64},
        "stages": [{"train": stage}, {"export": {}}],
    }
    runs = [
        lmx.open_run(folder),
        lmx.open_run("exports/same"),
        lmx.train(recipe, output="exports/dict", quiet=True),
    ]
    assert len({*map(weights, runs)}) == 1
    # A control: another rate gives other bytes.
    stage["learning_rate"] = 1e-2
    assert weights(lmx.train(recipe, output="other", quiet=True)) != weights(runs[0])
    # The same command finds its run, whose stages are complete.
    before = os.stat(folder / "model").st_mtime_ns
    assert main.main(["train", *words[:-1]]) == 0
    assert "1-train: already complete" in capsys.readouterr().out
    assert os.stat(folder / "model").st_mtime_ns == before


@pytest.mark.parametrize("verb", ["quantize", "draft"])
def test_job_prints_the_same_recipe_as_python(
    verb, train_words, checkpoint, tmp_path, capsys
):
    words = [verb, "--model", str(checkpoint), "--bits", "3", "--dry-run"]
    if verb == "draft":
        words += ["--data", "my.jsonl", "--steps=7"]
    assert main.main([*words, "--output", "here", "seed=2"]) == 0
    text = capsys.readouterr().out.partition("\nmodel  ")[0]
    file = tmp_path / "printed.yaml"
    file.write_text(text + "\n")
    recipe = lmx.Recipe(file).to_dict()
    assert recipe["output"] == "here"
    assert recipe["seed"] == 2
    assert (
        recipe["stages"]
        == {
            "quantize": [{"quantize": {"bits": 3}}, {"export": {}}],
            "draft": [{"draft": {"quantization": {"bits": 3}, "steps": 7}}],
        }[verb]
    )
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data", "my.jsonl"], "--model is missing"),
        (["draft", "--model", "m"], "--data is missing"),
        (["train", "lora", "--steps", "3"], "a recipe and --steps: give one of them"),
        (["quantize", "--model", "m", "--bits", "9"], "stages.1.quantize.bits"),
    ],
)
def test_wrong_options_are_a_usage_error(words, message, capsys):
    assert main.main(words) == 2
    assert message in capsys.readouterr().err
