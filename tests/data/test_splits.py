"""Training records and held-out evaluation records."""

import json
from pathlib import Path

import pytest
from lmx.config.data import DataConfig
from lmx.data.splits import Splits
from lmx.errors import UserError

ANSWER = {"role": "assistant", "content": "b"}


def write_records(path, count, name="row"):
    path.parent.mkdir(parents=True, exist_ok=True)
    records = ({"prompt": f"{name} {i}", "completion": "yes"} for i in range(count))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def make_splits(messages=None, warnings=None, seed=0, **data):
    messages, warnings = ([] if x is None else x for x in (messages, warnings))
    return Splits(
        DataConfig(**data),
        find=Path,
        seed=seed,
        info=messages.append,
        warning=warnings.append,
    )


def split_records(*arguments, **settings):
    """Return training records and validation records."""
    splits = make_splits(*arguments, **settings)
    return list(splits.train), splits.valid


def places(records):
    return [record.where for record in records]


def test_data_valid_is_the_validation_set(tmp_path):
    train = write_records(tmp_path / "a.jsonl", 20)
    valid = write_records(tmp_path / "b.jsonl", 5)
    messages = []
    records, eval_records = split_records(messages, train=train, valid=valid)
    assert (len(records), len(eval_records)) == (20, 5)
    assert messages == [f"valid: {valid}: 5 examples, format completion"]


def test_source_validation_split_is_used(tmp_path):
    write_records(tmp_path / "rows" / "train.jsonl", 20)
    write_records(tmp_path / "rows" / "validation.jsonl", 4)
    other_source = write_records(tmp_path / "other.jsonl", 40)
    messages = []
    records, eval_records = split_records(
        messages, train=[str(tmp_path / "rows"), other_source]
    )
    assert len(records) == 60
    assert {Path(place).name.split(":")[0] for place in places(eval_records)} == {
        "validation.jsonl"
    }
    assert len(eval_records) == 4
    assert not any("held out from" in line for line in messages)


def test_column_split_keeps_examples_of_other_splits_apart(tmp_path):
    """The training examples come first, and are more than the format is read from."""
    names = ["train"] * 210 + ["validation"] * 3 + ["test"] * 2
    rows = (
        {"prompt": f"{n}", "completion": "b", "split": s} for n, s in enumerate(names)
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    warnings = []
    records, eval_records = split_records(
        warnings=warnings, train=str(path), valid=str(path)
    )
    assert (len(records), len(eval_records)) == (210, 3)
    assert "its column split is train, not valid" in warnings[0]
    path.write_text(path.read_text().replace("validation", "train"))
    with pytest.raises(
        UserError, match="the first: its column split is train, not val"
    ):
        split_records(train=str(path), valid=str(path))


def test_log_says_which_files_of_a_folder_are_read(tmp_path):
    write_records(tmp_path / "rows" / "data.jsonl", 8)
    write_records(tmp_path / "rows" / "eval.jsonl", 4)
    (tmp_path / "rows" / "more.xlsx").write_text("a,b")
    folder, messages = str(tmp_path / "rows"), []
    splits = make_splits(messages, train=folder)
    assert len(list(splits.train)) == 8
    assert len(splits.valid) == 4
    assert messages[1] == (
        f"valid: {folder}: valid: eval.jsonl; without a split: data.jsonl; "
        "not read: more.xlsx"
    )
    assert [*splits.train.stats[folder].counts()][1] == (
        f"{folder}: train: data.jsonl; valid: eval.jsonl; not read: more.xlsx"
    )


def test_share_of_every_source_is_held_out(tmp_path):
    first, second = (
        write_records(tmp_path / "a.jsonl", 60),
        write_records(tmp_path / "b.jsonl", 40),
    )
    messages = []
    records, eval_records = split_records(messages, train=[first, second])
    assert 1 <= len(eval_records) <= 12
    assert messages == [
        *(f"valid: holding out examples of {path}" for path in (first, second)),
        f"valid: {len(eval_records)} examples held out from train",
    ]
    assert sorted(places(records) + places(eval_records)) == sorted(
        f"{path}:{line}"
        for path, n in ((first, 60), (second, 40))
        for line in range(1, n + 1)
    )
    assert places(split_records(train=[first, second])[1]) == places(eval_records)
    assert places(split_records(train=[first, second], seed=1)[1]) != places(
        eval_records
    )


def test_source_named_twice_is_held_out_from_both(tmp_path):
    path = write_records(tmp_path / "a.jsonl", 40)
    records, eval_records = split_records(train=[path, path])
    assert len(records) == 2 * (40 - len(eval_records))
    assert not set(places(records)) & set(places(eval_records))


def test_recipe_without_training_data(tmp_path):
    records, eval_records = split_records(valid=write_records(tmp_path / "a.jsonl", 3))
    assert (records, len(eval_records)) == ([], 3)


def test_skipped_examples_are_logged(tmp_path):
    path = write_records(tmp_path / "a.jsonl", 3)
    with open(path, "a") as stream:
        stream.write('{"prompt": 1}\n' * 8)
    warnings = []
    splits = make_splits(warnings=warnings, train=path, valid=path)
    assert len(list(splits.train)) == len(splits.valid) == 3
    stats = splits.train.stats[path]
    assert (stats.records, stats.skipped, len(stats.first_skipped)) == (3, 8, 5)
    assert warnings[0].startswith(f"{path}:4: example skipped: ")
    assert warnings[5] == f"{path}: 3 more examples skipped"


@pytest.mark.parametrize("limit", [2, 10])
def test_max_samples_applies_to_each_source(tmp_path, limit):
    paths = [write_records(tmp_path / name, 50) for name in ("a.jsonl", "b.jsonl")]
    records, eval_records = split_records(
        train=paths, valid=paths[0], max_samples=limit
    )
    assert (len(records), len(eval_records)) == (2 * limit, limit)


@pytest.mark.parametrize("has_valid", [True, False])
def test_sources_are_read_in_turn(tmp_path, has_valid):
    """Callers that read only the first records get some of every source."""
    files = [
        write_records(tmp_path / f"{name}.jsonl", count)
        for name, count in (("a", 60), ("b", 40), ("c", 3))
    ]
    keys = {"train": files} | ({"valid": files} if has_valid else {})
    splits = make_splits(**keys)
    records = [*splits.train]
    # Reports name the sources as the recipe does, not as they end.
    assert [*splits.train.stats] == files
    for read in (records, splits.valid):
        sources = [Path(place).name[0] for place in places(read)]
        counts = [sources.count(name) for name in "abc"]
        assert counts[0] > counts[1] > counts[2] > 0
        assert sources[: 3 * counts[2]] == ["a", "b", "c"] * counts[2]
        shared = 3 * counts[2] + 2 * (counts[1] - counts[2])
        assert {*sources[shared:]} == {"a"}


def test_training_records_are_read_lazily(tmp_path):
    valid = write_records(tmp_path / "b.jsonl", 3)
    splits = make_splits(train=str(tmp_path / "none.jsonl"), valid=valid)
    assert len(splits.valid) == 3
    with pytest.raises(UserError, match="there is no such file"):
        list(splits.train)


def test_training_records_can_be_read_again(tmp_path):
    records = make_splits(train=write_records(tmp_path / "a.jsonl", 40)).train
    assert places(records) == places(records)


def test_held_out_split_is_cached(tmp_path, cache_folder, monkeypatch):
    """The key depends on the content. With a cached split, no record is read."""
    path = write_records(tmp_path / "a.jsonl", 300)
    chat = {"messages": [{"role": "user", "content": "a"}, ANSWER], "skill": "s"}
    Path(path).write_text(Path(path).read_text().replace("row", "raw"))
    other_source = tmp_path / "chat.jsonl"
    other_source.write_text((json.dumps(chat) + "\n") * 30)
    sources = [path, str(other_source)]
    eval_records = make_splits(train=sources).valid
    monkeypatch.setattr("lmx.data.splits.choose_eval_records", None)
    assert make_splits(train=sources).valid == eval_records
    with pytest.raises(TypeError):
        assert make_splits(train=sources, seed=1).valid
    with open(path, "a") as stream:
        stream.write('{"prompt": "more", "completion": "rows"}\n')
    with pytest.raises(TypeError):
        assert make_splits(train=sources).valid


def test_hub_stream_needs_no_limit(hub, cache_folder):
    splits = make_splits(train="someone/rows", streaming=True)
    # The dataset has a validation split.
    assert len(list(splits.train)) == len(splits.valid) == 50
    assert hub == [("train", True), ("validation", True)]
    assert (
        len(
            list(make_splits(train="someone/rows", streaming=True, max_samples=7).train)
        )
        == 7
    )
