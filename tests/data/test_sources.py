"""Which rows are trained on and which are held out."""

import json
from pathlib import Path

import pytest

from toolkit.data.sources import Data, read_splits


def write(path, count, name="row"):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"{name} {i}", "completion": "yes"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def split(said=None, warned=None, seed=0, **data):
    said, warned = ([] if x is None else x for x in (said, warned))
    return read_splits(
        Data(**data), find=Path, seed=seed, say=said.append, warn=warned.append
    )


def places(rows):
    return [row.where for row in rows]


def test_named_rows_are_held_out(tmp_path):
    train = write(tmp_path / "a.jsonl", 20)
    valid = write(tmp_path / "b.jsonl", 5)
    said = []
    rows, held = split(said, train=train, valid=valid)
    assert (len(rows), len(held)) == (20, 5)
    assert said == [
        f"train: {train}: 20 rows, format completion",
        f"valid: {valid}: 5 rows, format completion",
    ]


def test_else_the_sources_own_split(tmp_path):
    write(tmp_path / "rows" / "train.jsonl", 20)
    write(tmp_path / "rows" / "validation.jsonl", 4)
    other = write(tmp_path / "other.jsonl", 40)
    said = []
    rows, held = split(said, train=[str(tmp_path / "rows"), other])
    assert len(rows) == 60
    assert {Path(place).name.split(":")[0] for place in places(held)} == {
        "validation.jsonl"
    }
    assert len(held) == 4
    assert not any("set aside" in line for line in said)


def test_else_a_share_is_set_aside(tmp_path):
    first, second = write(tmp_path / "a.jsonl", 60), write(tmp_path / "b.jsonl", 40)
    said = []
    rows, held = split(said, train=[first, second])
    assert len(held) == 5
    assert "valid: 5 rows set aside from train" in said
    assert sorted(places(rows) + places(held)) == sorted(
        f"{path}:{line}"
        for path, n in ((first, 60), (second, 40))
        for line in range(1, n + 1)
    )
    assert places(split(train=[first, second])[1]) == places(held)
    assert places(split(train=[first, second], seed=1)[1]) != places(held)


def test_rows_named_twice_are_held_out_from_both(tmp_path):
    path = write(tmp_path / "a.jsonl", 40)
    said = []
    rows, held = split(said, train=[path, path])
    assert len(held) == 2
    assert len(rows) == 2 * 38
    assert not set(places(rows)) & set(places(held))
    assert len(said) == 2


def test_a_document_gives_its_tail(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    [row], [held] = split(train=str(path))
    assert row.text + held.text == path.read_text()
    assert 4 <= held.text.count("\n") <= 6


def test_validation_alone(tmp_path):
    rows, held = split(valid=write(tmp_path / "a.jsonl", 3))
    assert (rows, len(held)) == ([], 3)


def test_bad_rows_are_named(tmp_path):
    path = write(tmp_path / "a.jsonl", 3)
    with open(path, "a") as stream:
        stream.write('{"prompt": 1}\n' * 8)
    warned = []
    rows, _ = split(warned=warned, train=path, valid=path)
    assert len(rows) == 3
    assert warned[0].startswith(f"{path}:4: row skipped: ")
    assert warned[5] == f"{path}: 3 more rows skipped"


@pytest.mark.parametrize("limit", [2, 10])
def test_limit_is_of_each_source(tmp_path, limit):
    paths = [write(tmp_path / name, 50) for name in ("a.jsonl", "b.jsonl")]
    rows, held = split(train=paths, valid=paths[0], limit=limit)
    assert (len(rows), len(held)) == (2 * limit, limit)
