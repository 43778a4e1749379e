"""`lmx train` and `lmx quantize` without a recipe file."""

import json
from pathlib import Path

import lmx
import pytest
from lmx.api import jobs
from lmx.cli import main


@pytest.fixture
def checkpoint(make_checkpoint):
    return make_checkpoint()


@pytest.fixture(autouse=True)
def examples(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Add {n} and 1.", "completion": f"{n + 1}"} for n in range(16)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


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
    checkpoint, tmp_path, capsys, recipe_of_python
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


@pytest.mark.parametrize("kind", ["quantize", "train"])
def test_options_recognize_the_columns_of_the_data(kind, checkpoint, tmp_path, capsys):
    rows = "".join(f"Is {n} even?,yes\n" for n in range(16))
    (tmp_path / "rows.csv").write_text(f"frage,antwort\n{rows}")
    words = [kind, "--model", str(checkpoint), "--data", "rows.csv"]
    data = recipe_of_words(words, tmp_path, capsys).config.data
    assert data.columns == {"prompt": "frage", "completion": "antwort"}
    named = "data.columns={prompt: antwort, completion: frage}"
    data = recipe_of_words([*words, named], tmp_path, capsys).config.data
    assert data.columns == {"prompt": "antwort", "completion": "frage"}


FAST = {"method": "gptq", "effort": "fast"}


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        (["--bits=3"], FAST | {"bits": 3}),
        (["--method=rtn"], {"method": "rtn"}),
        (["stages.quantize.method=rtn"], {"method": "rtn"}),
        (["stages.quantize.method=gptq", "--bits=3"], {"method": "gptq", "bits": 3}),
    ],
)
@pytest.mark.parametrize("data", [None, "my.jsonl"])
def test_quantize_measures_and_takes_gptq(
    given, stage, data, checkpoint, tmp_path, capsys, recipe_of_python
):
    words = ["quantize", "--model", str(checkpoint), *given]
    printed = recipe_of_words(
        [*words, *["--data", data] * bool(data)], tmp_path, capsys
    )
    expected = lmx.Recipe(
        model=checkpoint,
        data={"train": data} if data else {"valid": "builtin:stdlib"},
        seed=0,
        stages=[{"quantize": stage}, {"evaluate": {}}, {"export": {}}],
    )
    assert printed.hash == expected.hash
    keys = {"bits": 3} if "effort" in stage else stage
    lmx.quantize(checkpoint, data=data, **keys)
    assert recipe_of_python[0].hash == expected.hash


@pytest.mark.parametrize(
    ("given", "stage"),
    [
        ([], {"epochs": 1, "batch_tokens": 2048}),
        (["--epochs=2", "--batch-size=4"], {"epochs": 2, "batch_size": 4}),
        (["--budget=3h"], {"budget": "3h", "batch_tokens": 2048}),
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
    given, stage, checkpoint, tmp_path, capsys
):
    words = ["train", "--model", str(checkpoint), "--data=my.jsonl", *given]
    words += ["--valid=my.jsonl", "--max-seq-length=64", "--seed=2"]
    expected = lmx.Recipe(
        model=checkpoint,
        data={"train": "my.jsonl", "valid": "my.jsonl", "max_seq_length": 64},
        seed=2,
        stages=[{"train": stage}, {"evaluate": {}}, {"export": {}}],
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
