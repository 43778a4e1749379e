"""Unusable datasets are errors of the recipe, found before any stage runs."""

import pytest
import yaml
from lmx.config.errors import ConfigErrors
from lmx.pipeline.plan import load
from tiny_runs import SCRATCH_CONFIG

FILES = {
    "chats.jsonl": '{"messages": [{"role": "user", "content": "1 + 1?"}]}\n',
    "pairs.jsonl": '{"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}\n',
    "labels.jsonl": '{"prompt": "1 + 1?", "completion": "2", "label": true}\n',
    "empty.jsonl": "\n",
    "colours.jsonl": '{"colour": "red"}\n',
    "half.jsonl": '{"messages": [}\n',
}
TRAIN = {"steps": 1, "batch_size": 1}


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """A function that returns the message about a recipe; empty = it is correct."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def problems(data: dict, *stages: dict) -> str:
        model = {"from_scratch": SCRATCH_CONFIG}
        recipe = {"model": model, "data": data, "stages": [{"train": TRAIN}, *stages]}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        try:
            load("recipe.yaml")
        except ConfigErrors as error:
            return str(error)
        return ""

    return problems


def train(loss: dict, **keys) -> dict:
    return {"train": TRAIN | keys | {"loss": loss}}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.jsonl", "empty.jsonl: the source has no examples"),
        ("colours.jsonl", "colours.jsonl: no dataset format matches the keys colour"),
        ("half.jsonl", "half.jsonl:1: line 1 is not JSON"),
        ("none.jsonl", "no such file or folder: 'none.jsonl'"),
        ("builtin:none", "unknown built-in data 'none'"),
    ],
)
def test_unusable_sources(problems, name, message):
    for key in ("train", "valid"):
        error = problems({"train": "chats.jsonl", key: ["chats.jsonl", name]})
        assert message in error
        assert error.endswith("1 problem; nothing was run.")


def test_unknown_columns(problems):
    error = problems({"train": "chats.jsonl", "columns": {"promt": "question"}})
    assert "no dataset format has a column 'promt'" in error
    assert "did you mean 'prompt'?" in error
    assert error.endswith("1 problem; nothing was run.")


def test_columns_are_mapped(problems):
    data = {"train": "colours.jsonl"}
    assert problems(data)
    assert not problems(data | {"columns": {"text": "colour"}})


@pytest.mark.parametrize("name", ["empty.jsonl", "colours.jsonl", "none.jsonl"])
@pytest.mark.parametrize("is_listed", [False, True])
def test_unusable_calibration_data(problems, name, is_listed):
    dataset = ["chats.jsonl", name, "builtin:stdlib"] if is_listed else name
    calibration = {"calibration": {"dataset": dataset}}
    error = problems({"train": "chats.jsonl"}, {"quantize": {"bits": 4} | calibration})
    assert name in error
    assert error.endswith("1 problem; nothing was run.")


@pytest.mark.parametrize(
    ("loss", "right", "wrong"),
    [
        ("dpo", "pairs.jsonl", "chats.jsonl"),
        ("orpo", "pairs.jsonl", "labels.jsonl"),
        ("kto", "labels.jsonl", "pairs.jsonl"),
    ],
)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_losses_need_their_format(problems, loss, right, wrong, split):
    stage = train({"type": loss})
    data = {"train": right, "valid": right}
    assert not problems(data, stage)
    assert f"the loss {loss} needs" in problems(data | {split: wrong}, stage)
    # The examples of another format are skipped, with a warning.
    assert not problems(data | {split: [wrong, right]}, stage)


def test_unknown_rewards(problems):
    data = {"train": "chats.jsonl"}

    def error(*rewards: str) -> str:
        stage = train({"type": "grpo", "rewards": [*rewards]}, rollouts={})
        return problems(data, stage)

    assert not error("exact_match", "exact_match:flexible-extract")
    assert "there is no reward 'exactmatch'" in error("exact_match", "exactmatch")
    assert "there is no file none.py" in error("none.py:length")
