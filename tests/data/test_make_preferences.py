"""The preference data are reproducible, and every rejected answer has a mistake."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("make_preferences")


DATA = Path(__file__).parents[2] / "data"


def test_script_reproduces_the_preferences_byte_for_byte(script, tmp_path, capsys):
    script.main(tmp_path)
    for split in script.PER_KIND:
        shipped = (DATA / "preferences" / f"{split}.jsonl").read_bytes()
        assert (tmp_path / f"{split}.jsonl").read_bytes() == shipped


@pytest.mark.parametrize("split", ["train", "valid"])
def test_rejected_answers_differ_from_right_ones(split):
    lines = (DATA / "preferences" / f"{split}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    right = {}
    for line in (DATA / "skills" / f"{split}.jsonl").read_text().splitlines():
        user, assistant = json.loads(line)["messages"]
        right[user["content"]] = assistant["content"]
    for row in rows:
        [prompt], [chosen], [rejected] = row["prompt"], row["chosen"], row["rejected"]
        assert chosen["content"] == right[prompt["content"]]
        assert rejected["content"].strip() not in ("", chosen["content"])
