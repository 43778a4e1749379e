"""`lmx train` and `lmx quantize` without a recipe file."""

import json
import os
from pathlib import Path

import lmx
import pytest
from lmx.api import jobs
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


def test_quantize_gives_the_bytes_of_its_recipe_and_of_python(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["quantize", "--model", str(checkpoint), "--bits", "3", "--group-size=32"]
    assert main.main([*words, "--output", "words", "--quiet"]) == 0
    assert main.train(["words/recipe.yaml", "output=file", "--quiet"]) == 0
    keys = {"bits": 3, "group_size": 32, "quiet": True}
    folders = ["words", "file", lmx.quantize(checkpoint, output="keys", **keys).path]
    assert len({weights(lmx.open_run(folder)) for folder in folders}) == 1
    other = lmx.quantize(checkpoint, output="other", **{**keys, "bits": 4})
    assert weights(other) != weights(lmx.open_run("words"))


@pytest.fixture
def recipe_of_python(monkeypatch) -> list[lmx.Recipe]:
    """The recipes that the functions of one stage would run."""
    recipes = []
    monkeypatch.setattr(jobs, "train", lambda r, **_: recipes.append(lmx.Recipe(r)))
    return recipes


def recipe_of_words(words, tmp_path, capsys) -> lmx.Recipe:
    """The recipe that a command prints."""
    assert main.main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out.partition("\nmodel  ")[0]
    file = tmp_path / "printed.yaml"
    file.write_text(text + "\n")
    return lmx.Recipe(file)


def test_options_of_quantize_are_keywords_of_python(
    train_words, checkpoint, tmp_path, capsys, recipe_of_python
):
    words = ["quantize", "--model", str(checkpoint), "--data", "my.jsonl"]
    words += ["--method=gptq", "--bits=3", "--group-size=32", "--seed=2"]
    printed = recipe_of_words([*words, "--output", "here"], tmp_path, capsys)
    settings = {"method": "gptq", "bits": 3, "group_size": 32, "seed": 2}
    lmx.quantize(checkpoint, data="my.jsonl", **settings)
    assert printed.hash == recipe_of_python[0].hash
    assert printed.output == Path("here")
    lmx.quantize(checkpoint, data="my.jsonl", **{**settings, "seed": 3})
    assert printed.hash != recipe_of_python[1].hash
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ([], {"epochs": 1, "batch_tokens": 2048}),
        (["--epochs=2", "--batch-size=4"], {"epochs": 2, "batch_size": 4}),
        (["--steps=3", "--batch-tokens=64"], {"steps": 3, "batch_tokens": 64}),
        (
            ["--lora-rank=4", "--bits=4", "--learning-rate=2e-4"],
            {
                "adapter": {"rank": 4},
                "qat": {"bits": 4},
                "learning_rate": 2e-4,
                "epochs": 1,
                "batch_tokens": 2048,
            },
        ),
    ],
)
def test_options_of_train_stand_for_a_recipe(
    given, stage, train_words, checkpoint, tmp_path, capsys
):
    words = ["train", "--model", str(checkpoint), "--data=my.jsonl", *given]
    words += ["--valid=my.jsonl", "--max-seq-length=64", "--seed=2"]
    expected = lmx.Recipe(
        model=checkpoint,
        data={"train": "my.jsonl", "valid": "my.jsonl", "max_seq_length": 64},
        seed=2,
        stages=[{"train": stage}, {"export": {}}],
    )
    assert recipe_of_words(words, tmp_path, capsys).hash == expected.hash


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data", "my.jsonl"], "--model is missing"),
        (["train", "--model", "m"], "--data is missing"),
        (["train", "lora", "--steps", "3"], "a recipe and --steps: give one of them"),
        (["quantize", "--model", "m", "--bits", "9"], "stages.1.quantize.bits"),
    ],
)
def test_wrong_options_are_a_usage_error(words, message, capsys):
    assert main.main(words) == 2
    assert message in capsys.readouterr().err
