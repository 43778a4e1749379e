"""Records of every format and of the Hub, and the errors of invalid records."""

import gzip
import json
import math
import tracemalloc

import pytest
from lmx.data import dataset, hub_datasets
from lmx.data.record_formats import nearest
from lmx.errors import UserError
from reading import skip_reason


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


USER, ANSWER, NO = user("Hi"), assistant("Hello"), assistant("No")
CHAT = {"messages": [USER, ANSWER]}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
PARTS = user([{"type": "text", "text": "Hi"}])


@pytest.mark.parametrize(
    ("record", "name", "fields"),
    [
        (CHAT, "chat", {"messages": (USER, ANSWER)}),
        ({"conversations": SHAREGPT}, "chat", {"messages": (USER, ANSWER)}),
        ({"messages": [PARTS, ANSWER]}, "chat", {"messages": (USER, ANSWER)}),
        (
            {"prompt": [USER], "completion": [ANSWER]},
            "completion",
            {"messages": (USER, ANSWER), "prompt_messages": 1},
        ),
        (
            {"instruction": "Hi", "input": "", "output": "Hello"},
            "instruction",
            {"messages": (USER, ANSWER), "prompt_messages": 1},
        ),
        (
            {"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"]] * 2},
            "instruction",
            {"messages": (USER, ANSWER) * 3, "prompt_messages": 5},
        ),
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            "instruction",
            {"messages": (user("Add\n\n1 2"), assistant("3")), "prompt_messages": 1},
        ),
        (
            {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"},
            "preference",
            {"prompt": "Hi", "completion": "Hello", "rejected": "Go away"},
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, NO]},
            "preference",
            {"messages": (USER, ANSWER), "rejected": (USER, NO), "prompt_messages": 1},
        ),
        (
            {"prompt": "Hi", "completion": "Go away", "label": False},
            "unpaired_preference",
            {"prompt": "Hi", "completion": "Go away", "label": False},
        ),
        (
            {"prompt": "Hi", "chosen": [ANSWER], "rejected": []},
            "preference",
            {"messages": (USER, ANSWER), "prompt_messages": 1},
        ),
        (
            {"prompt": "Hi", "chosen": [USER, ANSWER]},
            "preference",
            {"messages": (USER, ANSWER), "prompt_messages": 1},
        ),
        ({"text": "Once."}, "text", {"text": "Once."}),
    ],
)
def test_every_format_is_parsed(write, record, name, fields):
    path = write([{**record, "skill": "greeting", "id": 7}])
    reader = dataset.RecordReader(path)
    assert reader.format == name
    assert list(reader) == [dataset.DataRecord(f"{path}:1", **fields, skill="greeting")]
    assert reader.stats.skipped == 0
    assert reader.stats.unknown == ("id",)


def test_majority_decides_the_format_and_others_are_logged(write):
    path = write([{"text": "stray"}, *[CHAT] * 5, {"messages": [USER]}, "no object"])
    reader = dataset.RecordReader(path)
    assert (reader.format, len(list(reader))) == ("chat", 5)
    assert reader.stats.first_skipped == (
        (f"{path}:1", "not chat: it has text"),
        (f"{path}:7", "no assistant turn with content"),
        (f"{path}:8", "not chat: it has no object"),
    )


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hi", "messages is text, not a list"),
        (["Hi"], "message 1 is text, not an object"),
        ([{"role": "king", "content": "x"}], "message 1 has the role 'king'"),
        ([{"role": {}, "content": "x"}], "message 1 has the role {}"),
        ([USER, {"role": "assistant"}], "message 2 has no content"),
        ([USER, {**ANSWER, "content": " "}], "no assistant turn with content"),
        (
            [{**USER, "content": [{"type": "image"}]}],
            "message 1 has a part that is not",
        ),
    ],
)
def test_invalid_chats_are_skipped(write, messages, reason):
    assert skip_reason(write, CHAT, {"messages": messages}).startswith(reason)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"prompt": "x", "completion": None}, "completion is empty, not text"),
        ({"prompt": {}, "completion": "y"}, "prompt is an object, not text"),
        ({"prompt": "x", "completion": True}, "completion is a boolean, not text"),
        # Gaps of pandas.
        ({"prompt": "x", "completion": math.nan}, "completion is a number, not text"),
        ({"prompt": 2, "completion": "y"}, "prompt is a number, not text"),
    ],
)
def test_invalid_completions_are_skipped(write, record, reason):
    assert skip_reason(write, {"prompt": "a", "completion": "b"}, record) == reason


DUPLICATE = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
UNREADABLE = "more digits or levels than can be read"
SURROGATE = '"\\ud800"'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[" * 20_000 + "]" * 20_000, UNREADABLE),
        ('{"messages": ' + "[" * 20_000 + "]" * 20_000 + "}", UNREADABLE),
        ('{"messages": ' + "9" * 5000 + "}", UNREADABLE),
        ("17", "not chat: it has no object"),
        (DUPLICATE, "an object has the key 'content' twice"),
        ('{"messages": 1, "messages": 2}', "an object has the key 'messages' twice"),
        (f"{{{SURROGATE}: 1}}", "not chat: it has ?"),
        (f'{{"{"k" * 5000}": 1}}', f"not chat: it has {'k' * 100}"),
        (
            f'{{"messages": [{{"role": "assistant", "content": {SURROGATE}}}]}}',
            "message 1 has half of a surrogate pair",
        ),
        (
            f'{{"messages": [{{"role": "assistant", "tool_calls": [{SURROGATE}]}}]}}',
            "message 1: a tool call is text, not an object",
        ),
    ],
    ids=range(10),
)
def test_rows_that_no_tokenizer_could_take_are_skipped(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(CHAT), line, json.dumps(CHAT)]))
    reader = dataset.RecordReader(str(path))
    assert len(list(reader)) == 2
    assert reader.stats.first_skipped == ((f"{path}:2", reason),)


def test_a_source_that_cannot_be_read_says_why(tmp_path):
    path = tmp_path / "rows.jsonl"
    for line, reason in (("[" * 3000 + "]" * 3000, UNREADABLE), (DUPLICATE, "twice")):
        path.write_text(line)
        with pytest.raises(UserError, match="no example can be read; .*" + reason):
            dataset.RecordReader(str(path))


def test_columns_are_renamed(write):
    path = write([{"question": "1+1", "answer": "2", "text": "ignored", "skill": "s"}])
    columns = {"prompt": "question", "completion": "answer"}
    reader = dataset.RecordReader(path, columns=columns)
    assert reader.format == "completion"
    [record] = reader
    assert (record.prompt, record.completion, record.skill) == ("1+1", "2", "s")
    assert dataset.RecordReader(path).format == "text"


def test_named_column_that_no_example_has_is_refused(write):
    """Also in rows that have lmx's own names, and where another column is right."""
    own = {"prompt": "1+1", "completion": "2", "ticket": "x"}
    path = write([own] * 3)
    for columns in ({"prompt": "tickett"}, {"prompt": "tickett", "completion": "2"}):
        with pytest.raises(UserError, match="no example has the column") as error:
            dataset.RecordReader(path, columns=columns)
        assert (error.value.hint == "did you mean 'ticket'?") == (len(columns) == 1)
    # One of many examples suffices, and built-in data has no such columns.
    late = [own] * dataset.DETECTION_RECORDS + [own | {"persona": "You are brief."}]
    columns = {"system": "persona"}
    [*_, last] = dataset.RecordReader(write(late), columns=columns)
    assert last.messages[0]["content"] == "You are brief."
    assert dataset.RecordReader("builtin:stdlib", columns=columns).format == "text"


QUESTION = {"q": "1+1", "a": "2"}
QA = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("columns", "more", "reason"),
    [
        (QA, {"image": "x.png"}, "it has image; lmx trains on text"),
        (QA, {"weight": 0.5}, "it has the weight 0.5; lmx has no weights"),
        (QA, {"train": False}, "it has train: false"),
        (QA, {"history": [["a", "b"]]}, "only instruction examples may have"),
        ({"messages": "dialog"}, {"dialog": CHAT["messages"], "label": True}, "label"),
    ],
    ids=["image", "weight", "flag", "history", "label of a chat"],
)
def test_renamed_columns_hide_no_reason_to_skip(write, columns, more, reason):
    kept = QUESTION if columns is QA else {"dialog": CHAT["messages"]}
    reader = dataset.RecordReader(write([kept, kept | more]), columns=columns)
    assert len(list(reader)) == 1
    assert reason in reader.stats.first_skipped[0][1]


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        (QA, QUESTION | {"label": False}, {"label": False}),
        (
            {"chosen": "better"},
            {"prompt": "p", "better": "b", "rejected": "r"},
            {"prompt": "p", "completion": "b", "rejected": "r"},
        ),
        (
            {"instruction": "q", "output": "a"},
            QUESTION | {"input": "3", "history": [["x", "y"]]},
            {"prompt_messages": 3},
        ),
        ({"completion": "a"}, {"prompt": "p", "a": "2"}, {"completion": "2"}),
        (
            {"prompt": "completion", "completion": "prompt"},
            {"prompt": "p", "completion": "c"},
            {"prompt": "c", "completion": "p"},
        ),
        (
            {"messages": "dialog"},
            {
                "dialog": CHAT["messages"],
                "functions": [{"name": "f"}],
            },
            {"tools": ({"type": "function", "function": {"name": "f"}},)},
        ),
    ],
    ids=["label", "rejected", "history", "own prompt", "exchanged", "functions"],
)
def test_renamed_columns_keep_the_others_of_the_format(write, columns, row, expected):
    reader = dataset.RecordReader(write([row]), columns=columns)
    [record] = reader
    assert {name: getattr(record, name) for name in expected} == expected
    assert not reader.stats.unknown


@pytest.mark.parametrize(
    ("columns", "row", "unknown"),
    [
        (QA, QUESTION | {"messages": [1], "id": 3, "text": "t"}, "id messages text"),
        (QA, QUESTION | {"prompt": "p"}, "prompt (beside q)"),
        ({}, {"text": "t", "split": "fold 3"}, "split"),
        ({}, {"text": "t", "split": "train"}, ""),
        ({}, {"prompt": "p", "completion": "c", "input": "i"}, "input"),
        ({}, {"text": "t", "system": "s", "label": 1}, "label system"),
    ],
    ids=["columns", "taken name", "own split", "split", "other format", "text"],
)
def test_columns_that_the_format_does_not_read_are_named(write, columns, row, unknown):
    reader = dataset.RecordReader(write([row]), columns=columns)
    assert len(list(reader)) == 1
    assert " ".join(reader.stats.unknown) == unknown


def test_limit_and_find_and_builtin(write, tmp_path):
    write([{"text": str(number)} for number in range(9)])
    reader = dataset.RecordReader(
        "rows.jsonl", find=lambda name: tmp_path / name, limit=4
    )
    assert [record.text for record in reader] == ["0", "1", "2", "3"]
    records = list(dataset.RecordReader("builtin:stdlib", split="valid", limit=2))
    assert records[0].where.startswith("builtin:stdlib/")
    assert dataset.has_split("builtin:stdlib", "valid")


def test_records_of_a_file_are_not_held_in_memory(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as stream:
        for number in range(6_000):
            stream.write(json.dumps({"text": f"{number} " * 40}) + "\n")
    tracemalloc.start()
    reader = dataset.RecordReader(str(path))
    count = sum(1 for _ in reader)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == reader.stats.records == 6_000
    # The text of all records is 1.3 MB.
    assert peak < 600_000


def test_records_can_be_read_again_and_in_part(write):
    reader = dataset.RecordReader(write([*[{"text": "a"}] * 5, {"prompt": "b"}]))
    next(iter(reader))
    assert reader.stats is None
    assert list(reader) == list(reader)
    assert (reader.stats.records, reader.stats.skipped) == (5, 1)


@pytest.mark.parametrize(
    ("record", "mapping"),
    [
        (
            {"id": 1, "question": "?", "answer": "!"},
            "{prompt: question, completion: answer}",
        ),
        ({"conversation": []}, "{messages: conversation}"),
        ({"content": "x"}, "{text: content}"),
        ({"problem": "?", "mark": "1"}, "{prompt: problem, completion: mark}"),
        (
            {"problem": "?", "mark": 1, "id": 1},
            "{prompt: problem, completion: <your column>}",
        ),
    ],
)
def test_unknown_format_suggests_a_columns_block(write, record, mapping):
    with pytest.raises(UserError, match="no dataset format matches the keys") as error:
        list(dataset.RecordReader(write([record])))
    assert all(key in error.value.message for key in record)
    assert error.value.hint.endswith(f"data:\n  columns: {mapping}")


def test_unknown_columns_are_refused(write):
    path = write([{"q": "?", "a": "!"}])
    with pytest.raises(UserError, match="has a column 'promt'") as error:
        dataset.RecordReader(path, columns={"promt": "q"})
    assert error.value.hint == "did you mean 'prompt'?"


def test_hub_split_names_are_translated(hub):
    reader = dataset.RecordReader("someone/rows", split="valid")
    assert [record.where for record in reader][:1] == ["someone/rows/validation[0]"]
    assert len(list(dataset.RecordReader("someone/rows", streaming=True, limit=2))) == 2
    assert hub == [("validation", False), ("train", True)]
    assert dataset.source_fingerprint("someone/rows", "train")[2:] == [
        "abc",
        "default-1",
    ]
    assert dataset.has_split("someone/rows", "valid")
    assert not dataset.has_split("someone/rows", "test")


def test_hub_sources_name_configuration_and_split(hub):
    source = "someone/configured@v1:main[validation]"
    reader = dataset.RecordReader(source, split="train", limit=1)
    [record] = reader
    assert record.where == "someone/configured@v1:main/validation[0]"
    assert hub == [("validation", False, "main", "v1")]
    # Records of another split are another source.
    assert dataset.source_fingerprint(source, "train")[1] == "validation"
    assert not dataset.has_split(source, "valid")
    assert dataset.has_split("someone/configured:main", "valid")
    with pytest.raises(UserError, match="no split 'dev'; it has train, val") as error:
        dataset.RecordReader("someone/rows[dev]")
    assert error.value.hint == "name one, as in someone/rows[train]"
    with pytest.raises(UserError, match=r"Config name is missing.*'main'") as error:
        dataset.RecordReader("someone/configured[train]")
    assert error.value.hint == "name a configuration, as in someone/configured:NAME"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("name", ("name", None, None, None)),
        ("o/name@refs/pr/1", ("o/name", "refs/pr/1", None, None)),
        ("o/name:en", ("o/name", None, "en", None)),
        ("o/name[train]", ("o/name", None, None, "train")),
        ("o/name@v1:en[train]", ("o/name", "v1", "en", "train")),
        ("a/b/c", None),
        ("builtin:stdlib", None),
        ("./name", None),
        ("name:rows.jsonl", None),
        ("o/name:", None),
        ("o/name[train", None),
        ("o/name[]", None),
    ],
)
def test_hub_names_are_parsed(source, expected):
    parsed = hub_datasets.HubDataset.parse(source)
    names = ("name", "revision", "config", "split")
    assert (parsed and tuple(getattr(parsed, n) for n in names)) == expected


def test_local_paths_are_no_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("owner/name:en", "rows[1]"):
        (tmp_path / name).mkdir(parents=True)
        assert hub_datasets.HubDataset.parse(name) is None


def test_hub_errors_are_translated(hub, monkeypatch):
    with pytest.raises(UserError, match="no split for 'test'"):
        dataset.RecordReader("someone/rows", split="test")
    with pytest.raises(
        UserError, match=r"no such file or folder.*no dataset someone/else"
    ):
        dataset.RecordReader("someone/else")
    monkeypatch.setattr(hub_datasets, "_online", lambda endpoint: False)
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        dataset.RecordReader("someone/rows")


def test_closed_port_is_offline(monkeypatch):
    monkeypatch.setattr(hub_datasets, "getproxies", dict)
    assert not hub_datasets._online("http://127.0.0.1:9")


@pytest.mark.parametrize("known", ["email", "answer"])
@pytest.mark.parametrize("name", ["id", "UUID", "timestamp"])
def test_the_name_of_a_record_is_no_prompt_and_no_answer(known, name):
    format_name, columns = nearest([name, known])
    assert format_name == "completion"
    assert sorted(columns.values(), key=str) == [None, known]
