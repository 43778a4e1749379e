"""Which rows are trained on and which are held out."""

import json
from pathlib import Path

import pytest
from lmx.config.data import DataConfig
from lmx.data.splits import Splits
from lmx.errors import UserError

ANSWER = {"role": "assistant", "content": "b"}


def write(path, count, name="row"):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"prompt": f"{name} {i}", "completion": "yes"} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def splits(said=None, warned=None, seed=0, **data):
    said, warned = ([] if x is None else x for x in (said, warned))
    return Splits(
        DataConfig(**data),
        find=Path,
        seed=seed,
        info=said.append,
        warning=warned.append,
    )


def split(*arguments, **settings):
    """Training rows and validation rows."""
    found = splits(*arguments, **settings)
    return list(found.train), found.valid


def places(rows):
    return [row.where for row in rows]


def test_data_valid_is_the_validation_set(tmp_path):
    train = write(tmp_path / "a.jsonl", 20)
    valid = write(tmp_path / "b.jsonl", 5)
    said = []
    rows, held = split(said, train=train, valid=valid)
    assert (len(rows), len(held)) == (20, 5)
    assert said == [f"valid: {valid}: 5 examples, format completion"]


def test_source_validation_split_is_used(tmp_path):
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
    assert not any("held out from" in line for line in said)


def test_share_of_every_source_is_held_out(tmp_path):
    first, second = write(tmp_path / "a.jsonl", 60), write(tmp_path / "b.jsonl", 40)
    said = []
    rows, held = split(said, train=[first, second])
    assert 1 <= len(held) <= 12
    assert said == [
        *(f"valid: holding out examples of {path}" for path in (first, second)),
        f"valid: {len(held)} examples held out from train",
    ]
    assert sorted(places(rows) + places(held)) == sorted(
        f"{path}:{line}"
        for path, n in ((first, 60), (second, 40))
        for line in range(1, n + 1)
    )
    assert places(split(train=[first, second])[1]) == places(held)
    assert places(split(train=[first, second], seed=1)[1]) != places(held)


def test_source_named_twice_is_held_out_from_both(tmp_path):
    path = write(tmp_path / "a.jsonl", 40)
    rows, held = split(train=[path, path])
    assert len(rows) == 2 * (40 - len(held))
    assert not set(places(rows)) & set(places(held))


def test_single_document_source_gives_its_tail(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    [row], [held] = split(train=str(path))
    assert row.text + held.text == path.read_text()
    assert 4 <= held.text.count("\n") <= 6


def test_recipe_without_training_data(tmp_path):
    rows, held = split(valid=write(tmp_path / "a.jsonl", 3))
    assert (rows, len(held)) == ([], 3)


def test_skipped_examples_are_logged(tmp_path):
    path = write(tmp_path / "a.jsonl", 3)
    with open(path, "a") as stream:
        stream.write('{"prompt": 1}\n' * 8)
    warned = []
    found = splits(warned=warned, train=path, valid=path)
    assert len(list(found.train)) == len(found.valid) == 3
    stats = found.train.stats[path]
    assert (stats.records, stats.skipped, len(stats.first_skipped)) == (3, 8, 5)
    assert warned[0].startswith(f"{path}:4: example skipped: ")
    assert warned[5] == f"{path}: 3 more examples skipped"


@pytest.mark.parametrize("limit", [2, 10])
def test_max_samples_applies_to_each_source(tmp_path, limit):
    paths = [write(tmp_path / name, 50) for name in ("a.jsonl", "b.jsonl")]
    rows, held = split(train=paths, valid=paths[0], max_samples=limit)
    assert (len(rows), len(held)) == (2 * limit, limit)


def test_training_records_are_read_lazily(tmp_path):
    valid = write(tmp_path / "b.jsonl", 3)
    found = splits(train=str(tmp_path / "none.jsonl"), valid=valid)
    assert len(found.valid) == 3
    with pytest.raises(UserError, match="there is no such file"):
        list(found.train)


def test_training_records_can_be_read_again(tmp_path):
    rows = splits(train=write(tmp_path / "a.jsonl", 40)).train
    assert places(rows) == places(rows)


def test_held_out_split_is_cached(tmp_path, cache_folder, monkeypatch):
    """Of content: a changed file has others, and a cached start reads nothing."""
    path = write(tmp_path / "a.jsonl", 300)
    chat = {"messages": [{"role": "user", "content": "a"}, ANSWER], "skill": "s"}
    Path(path).write_text(Path(path).read_text().replace("row", "raw"))
    other = tmp_path / "chat.jsonl"
    other.write_text((json.dumps(chat) + "\n") * 30)
    both = [path, str(other)]
    held = splits(train=both).valid
    monkeypatch.setattr("lmx.data.splits.choose_eval_records", None)
    assert splits(train=both).valid == held
    with pytest.raises(TypeError):
        assert splits(train=both, seed=1).valid
    with open(path, "a") as stream:
        stream.write('{"prompt": "more", "completion": "rows"}\n')
    with pytest.raises(TypeError):
        assert splits(train=both).valid


def test_hub_stream_needs_no_limit(hub, cache_folder):
    found = splits(train="someone/rows", streaming=True)
    # It names a split for validation.
    assert len(list(found.train)) == len(found.valid) == 50
    assert hub == [("train", True), ("validation", True)]
    assert (
        len(list(splits(train="someone/rows", streaming=True, max_samples=7).train))
        == 7
    )
