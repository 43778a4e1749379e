"""All file types and folders, and the errors of damaged files."""

import gzip
import json
from datetime import datetime
from pathlib import Path

import pytest
from lmx.data import dataset, readers
from lmx.errors import UserError

USER, ANSWER = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
)
CHAT = {"messages": [USER, ANSWER]}


def test_json_list_and_gzipped_file(write, tmp_path):
    path = write(json.dumps([CHAT, CHAT]), "rows.json")
    assert [record.where for record in dataset.RecordReader(path)] == [
        f"{path}[0]",
        f"{path}[1]",
    ]
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(json.dumps(CHAT).encode()))
    assert len(list(dataset.RecordReader(str(zipped)))) == 1


def test_text_file_holds_one_or_several_documents(write):
    path = write("one\n\ntwo\n", "a.txt")
    assert [record.text for record in dataset.RecordReader(path)] == ["one\n\ntwo\n"]
    # The second file is one of Windows.
    for text in ("one\n<|endoftext|>\ntwo\n", "one\r\n<|endoftext|>\r\ntwo\r\n"):
        path = write(text, "b.txt")
        places = [(r.text, r.where) for r in dataset.RecordReader(path)]
        assert places == [("one\n", f"{path}:1"), ("two\n", f"{path}:3")]


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("a.csv", 'a,b\n1,"x\ny"\n\n3,"say ""hi"""\n', {2: "1|x\ny", 5: '3|say "hi"'}),
        ("a.csv", "\ufeffa,b\r\n007,NA\r\n,true\r\n", {2: "007|NA", 3: "|true"}),
        ("a.csv", 'a;b\n2,5;"x;y"', {2: "2,5|x;y"}),
        ("a.tsv", "a\tb\n1,2\tx;y\n", {2: "1,2|x;y"}),
        ("a.csv", ",a\n0,x\n", {2: "0|x"}),
        ("a.csv.gz", "a,b\n1,2\n", {2: "1|2"}),
    ],
    ids=["quotes", "Windows", "semicolons", "tabs", "index of pandas", "gzip"],
)
def test_tables_of_text(tmp_path, name, text, rows):
    """Values keep their type, which is text; a row has the line where it begins."""
    path = tmp_path / name
    encoded = text.encode()
    path.write_bytes(gzip.compress(encoded) if name.endswith("gz") else encoded)
    found = [*readers.read_records(path)]
    assert [(where, "|".join(row.values())) for where, row in found] == [
        (f"{path}:{line}", joined) for line, joined in rows.items()
    ]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a,b\n1,2\n\n3\n", 4, "the row has 1 values, and the header 2"),
        ("a,b\n1,2,3\n", 2, "the row has 3 values, and the header 2"),
        ('a,b\n1,2\n3,"4\n5,6\n', 3, "unexpected end of data"),
        ('a,b\n"1"x,2\n', 2, "expected after"),
        ("a,a\n1,2\n", 1, "the header has a name twice"),
    ],
)
def test_damaged_table_of_text_is_refused_with_its_line(write, text, line, message):
    path = write(text, "a.csv")
    with pytest.raises(UserError, match=message) as error:
        [*readers.read_records(Path(path))]
    assert error.value.place == f"{path}:{line}"


def test_parquet_messages_may_hold_dates_and_bytes(tmp_path):
    """As those of chat logs on the Hub, which have the time of every turn."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    extra = {"timestamp": datetime(2024, 5, 1), "header": b"\xff"}
    messages = [USER | extra, ANSWER | extra]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    reader = dataset.RecordReader(str(path))
    assert reader.format == "chat"
    assert [*reader] == [dataset.DataRecord(f"{path}[0]", messages=tuple(messages))]


def test_line_separators_inside_json_do_not_end_a_line(write):
    path = write(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False))
    [record] = dataset.RecordReader(path)
    assert record.text == "a\u2028b\x85c"


@pytest.fixture
def folder(write, tmp_path):
    """A function that writes a file of one example, its name, at each path."""

    def folder(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            write([{"text": name}], name)
        return tmp_path

    return folder


def read_files(path, split):
    try:
        return " ".join(r.text for r in dataset.RecordReader(str(path), split=split))
    except UserError as error:
        return error.message


@pytest.mark.parametrize(
    ("names", "train", "valid"),
    [
        ("data.jsonl eval.jsonl", "data.jsonl", "eval.jsonl"),
        ("train.jsonl val-0-of-1.jsonl test.jsonl", "train.jsonl", "val-0-of-1.jsonl"),
        ("a.jsonl b.jsonl", "a.jsonl b.jsonl", None),
        ("a.jsonl b.jsonl dev.jsonl", "a.jsonl b.jsonl", "dev.jsonl"),
        ("a_train.jsonl a_test.jsonl", "a_train.jsonl", None),
        ("a.jsonl train_b.jsonl train.jsonl", "train.jsonl train_b.jsonl", None),
        ("my-validation-2.jsonl rows.jsonl", "rows.jsonl", "my-validation-2.jsonl"),
        ("train/0.jsonl dev/0.jsonl", "train/0.jsonl", "dev/0.jsonl"),
        ("data/train-00000-of-1.jsonl", "data/train-00000-of-1.jsonl", None),
        ("a/b.jsonl c.jsonl", "a/b.jsonl c.jsonl", None),
        ("contest.jsonl developer.jsonl", "contest.jsonl developer.jsonl", None),
        (".git/a.jsonl b.jsonl", "b.jsonl", None),
    ],
)  # fmt: skip
def test_words_in_paths_name_splits(folder, names, train, valid):
    path = folder(*names.split())
    assert read_files(path, "train") == train
    assert dataset.has_split(str(path), "valid") == (valid is not None)
    assert valid is None or read_files(path, "valid") == valid


def test_path_with_two_splits_is_refused(folder):
    path = folder("train_test.jsonl", "rows.jsonl")
    with pytest.raises(UserError, match="names the splits test and train") as error:
        dataset.RecordReader(str(path))
    assert error.value.place.endswith("train_test.jsonl")


CARD = "---\nlicense: mit\nconfigs:\n{}---\n# Rows\n"
PLAIN = """\
- config_name: default
  data_files:
  - {split: train, path: "a*.jsonl"}
  - {split: validation, path: [held/**, b.jsonl]}
"""
OTHER = "- {config_name: other, data_files: b.jsonl}\n"


@pytest.mark.parametrize(
    ("card", "train", "valid"),
    [
        (CARD.format(PLAIN), "a1.jsonl a2.jsonl", "b.jsonl held/c.jsonl"),
        (CARD.format(OTHER + PLAIN), "a1.jsonl a2.jsonl", "b.jsonl held/c.jsonl"),
        (CARD.format(OTHER), "b.jsonl", None),
        ("Set configs: to", "a1.jsonl a2.jsonl b.jsonl dev.jsonl held/c.jsonl", None),
    ],
    ids=["default", "several", "one", "none"],
)
def test_card_names_the_files(folder, write, monkeypatch, card, train, valid):
    pytest.importorskip("datasets")
    path = folder("a1.jsonl", "a2.jsonl", "b.jsonl", "held/c.jsonl", "dev_.jsonl")
    write(card, "README.md")
    monkeypatch.chdir(path.parent)
    for name in (path, path.name):
        if "---" in card:
            assert sorted(read_files(name, "train").split()) == train.split()
            [line] = (line for line in _counts(name) if "not read: " in line)
            assert "dev_.jsonl" in line
        if valid:
            assert sorted(read_files(name, "valid").split()) == valid.split()


def _counts(path):
    reader = dataset.RecordReader(str(path))
    list(reader)
    return [*reader.stats.counts()]


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        (OTHER + OTHER.replace("other", "more"), "none of other, more is the default"),
        (OTHER.replace("b.jsonl", "none.jsonl"), "none.jsonl"),
        (OTHER.replace("data_files", "data_dir"), "data_files"),
        ("- 5\n", "configs of this card cannot be read"),
        ("- [\n", "configs of this card cannot be read"),
        (
            PLAIN.replace("train", "train_sft"),
            "no file of the split 'train'.*train_sft",
        ),
    ],
)
def test_card_that_names_no_files_is_refused(folder, write, configs, reason):
    pytest.importorskip("datasets")
    path = folder("a.jsonl", "b.jsonl", "held/c.jsonl")
    write(CARD.format(configs), "README.md")
    with pytest.raises(UserError, match=reason):
        dataset.RecordReader(str(path))


FAULTS = {
    "rows.jsonl": [
        ('{"text": "a"}\n{"text": ', r"rows\.jsonl:2: line 2 is not JSON: Expecting"),
        ("", "the source has no examples"),
        ("\n \n", "the source has no examples"),
        ('"a"\n"b"', "the examples are not JSON objects; the first is 'a'"),
        ('{"messages": []}', "all 1 are invalid as chat.*no assistant"),
    ],
    "rows.json": [
        ('[{"text": "a"},\n 5 5]', r"rows\.json:2:4: is not JSON"),
        ('{"text": "a"}', "is not a list of objects"),
        ("[]", "the source has no examples"),
        ('[{"text": "a", "text": "b"}]', "an object has the key 'text' twice"),
        ("[" * 3000, "more digits or levels than can be read"),
    ],
    "rows.txt": [(" \n", "the source has no examples")],
    "rows.csv": [("a,b\n", "the source has no examples")],
    "rows.xlsx": [("a", r"\.xlsx files are not")],
    "rows.parquet": [("PAR", "is not a Parquet file")],
    "rows.jsonl.gz": [("no gzip", "cannot be read: Not a gzipped file")],
}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [(name, *fault) for name, faults in FAULTS.items() for fault in faults],
)
def test_invalid_files_are_refused(write, name, text, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match=message) as fault:
        list(dataset.RecordReader(write(text, name)))
    assert name in fault.value.place


def test_missing_file_and_invalid_utf8_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        dataset.RecordReader(str(tmp_path / "none.jsonl"))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "\xff\xfe"}')
    with pytest.raises(UserError, match="is not UTF-8 text"):
        dataset.RecordReader(str(path))


def test_folder_without_the_split_lists_its_files(write, tmp_path):
    write([CHAT], "test.jsonl")
    with pytest.raises(UserError, match=r"no file of the split 'train'.*test\.jsonl"):
        dataset.RecordReader(str(tmp_path))
