"""Tools of a chat: read from every source, and rendered by the chat template."""

import json
from unittest.mock import MagicMock

import pytest
from lmx.api import functions
from lmx.data import cache, dataset, splits
from lmx.data.preference import encode_pairs
from lmx.draft.dataset import prompt_from_record
from lmx.generation.prompt import encode_chat
from lmx.pipeline.evaluate.questions import Question
from mlx_lm.tokenizer_utils import TokenizerWrapper
from reading import read, skip_reason
from test_tokenization import CHATML, build_tokenizer, encode_one, trained_texts

NAMES_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
)
CITY = {"type": "string", "description": "Name of a city"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": CITY}},
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {}}}
USER = {"role": "user", "content": "Is it warm in Rome?"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
ANSWER = {"role": "assistant", "content": "Yes."}
CHAT = {"messages": [USER, ANSWER], "tools": [WEATHER]}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(NAMES_TOOLS + CHATML)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": "Is it warm?", "completion": "Yes."},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "?"}]},
        {"instruction": "Is it warm?", "output": "Yes."},
    ],
)
def test_examples_of_every_format_but_text_have_tools(write, record):
    assert read(write([record | {"tools": [WEATHER, TIME]}])).tools == (WEATHER, TIME)
    as_text = json.dumps([WEATHER])
    assert read(write([record | {"tools": as_text}])).tools == (WEATHER,)
    for nothing in (None, [], "", " "):
        assert read(write([record | {"tools": nothing}])).tools is None
    renamed = {f"my {key}": value for key, value in record.items()}
    columns = {key: f"my {key}" for key in record}
    path = write([renamed | {"functions": [TIME]}])
    [record] = dataset.RecordReader(path, columns=columns | {"tools": "functions"})
    assert record.tools == (TIME,)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Rome"}', {"city": "Rome"}),
        ({"city": "Rome"}, {"city": "Rome"}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ("missing", {}),
    ],
)
def test_arguments_in_json_text_are_objects_as_in_servers(write, arguments, expected):
    """Files for OpenAI have text. mlx-lm's server and templates have objects."""
    call = {"id": "1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": arguments}
    if arguments == "missing":
        del call["function"]["arguments"]
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [parsed] = read(write([{"messages": messages}])).messages[1]["tool_calls"]
    assert parsed == call | {"function": {"name": "weather", "arguments": expected}}


FUNCTION, SCHEMA = WEATHER["function"], WEATHER["function"]["parameters"]
ANTHROPIC = {"name": "weather", "input_schema": SCHEMA}


@pytest.mark.parametrize(
    "tool",
    [
        FUNCTION,
        ANTHROPIC,
        ANTHROPIC | {"type": "custom"},
        {"name": "weather", "inputSchema": SCHEMA},
        FUNCTION | {"type": "function"},
        {"function": FUNCTION},
        {"type": "function", "function": ANTHROPIC},
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize("form", [list, json.dumps], ids=["list", "text"])
def test_tools_of_all_kinds_are_wrapped(write, tool, key, form):
    [parsed] = read(write([{"messages": [USER, ANSWER], key: form([tool])}])).tools
    assert parsed == WEATHER
    # Templates print the keys in this order.
    assert [*parsed] == ["type", "function"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"tools": [{"parameters": {}}]}, "tools has a function without a name"),
        ({"tools": [{"type": "web_search", "name": "a"}]}, "type 'web_search'"),
        ({"tools": [FUNCTION | {"parameters": "{}"}]}, "parameters is text, not an"),
        ({"tools": [ANTHROPIC | {"parameters": {}, "inputSchema": {"a": 1}}]}, "mean"),
        (
            {"tools": [WEATHER], "functions": [TIME]},
            "it has tools and functions, which",
        ),
        ({"tools": None, "functions": "weather"}, "tools is text that is not JSON"),
        (
            {"messages": [USER | {"tools": [TIME]}, ANSWER]},
            "it has tools and tools of message 1",
        ),
    ],
)
def test_other_tools_skip_the_example(write, extra, reason):
    assert reason in skip_reason(write, CHAT, CHAT | extra)


@pytest.mark.parametrize("form", [list, json.dumps], ids=["list", "text"])
def test_tools_of_a_message_are_those_of_the_example(write, form):
    system = {"role": "system", "content": "Be brief.", "tools": form([FUNCTION])}
    reader = dataset.RecordReader(write([{"messages": [system, USER, ANSWER]}]))
    [record] = reader
    assert record.tools == (WEATHER,)
    assert not reader.stats.unknown


def test_arguments_with_half_a_surrogate_pair_skip_the_example(write):
    call = {"function": {"name": "weather", "arguments": r'{"city": "\ud800"}'}}
    bad = {"messages": [USER, ANSWER | {"tool_calls": [call]}]}
    assert "surrogate" in skip_reason(write, CHAT, bad)


def test_arguments_of_any_depth_are_read_or_skipped(write):
    """Python reads a few levels more than it writes as a part of a message."""
    rows = [CHAT]
    for depth in range(900, 1000):
        arguments = '{"a": ' * depth + "1" + "}" * depth
        call = {"function": {"name": "weather", "arguments": arguments}}
        rows.append({"messages": [USER, ANSWER | {"tool_calls": [call]}]})
    reader = dataset.RecordReader(write(rows))
    assert 1 <= len(list(reader)) <= len(rows)


def test_tables_have_no_keys_of_other_rows(tmp_path):
    """Arrow gives every object the keys of all objects in its column."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calls = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    other = {"function": {"name": "time", "arguments": {"zone": "UTC"}}}
    others = [USER, {"role": "assistant", "tool_calls": [other]}]
    rows = [
        {"messages": calls, "tools": [WEATHER]},
        {"messages": others, "tools": [TIME | {"strict": True}]},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = dataset.RecordReader(str(path))
    assert first.messages[1]["tool_calls"] == [CALL]
    assert second.messages[1]["tool_calls"] == [other]
    assert first.tools == (WEATHER,)


def test_tools_are_a_part_of_the_prompt(write, tokenizer):
    record = read(write([CHAT]))
    expected = tokenizer.apply_chat_template(
        list(record.messages), tools=[WEATHER], tokenize=False
    )
    for loss_on in ("completions", "all"):
        example = encode_one(record, tokenizer, loss_on=loss_on)
        assert tokenizer.decode(example.tokens) == expected.rstrip("\n") + "\n"
    assert "Name of a city" in expected
    example = encode_one(record, tokenizer)
    assert trained_texts(example, tokenizer) == ["Yes.<|im_end|>"]


def test_long_chats_have_tools(write, tokenizer):
    record = read(write([{"messages": [USER, ANSWER] * 40, "tools": [WEATHER]}]))
    example = encode_one(record, tokenizer, max_seq_length=4096)
    assert "Name of a city" in tokenizer.decode(example.tokens)
    assert trained_texts(example, tokenizer) == ["Yes.<|im_end|>"] * 40


def test_both_completions_of_a_pair_have_tools(write, tokenizer):
    pair = {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "No."}]}
    record = read(write([pair | {"tools": [WEATHER]}]))
    settings = {"max_seq_length": 512, "loss_on": "completions"}
    for example in encode_pairs([record], tokenizer, **settings).examples:
        assert "Name of a city" in tokenizer.decode(example.tokens)


def test_prompts_of_drafts_and_evaluations_have_tools(write, tokenizer):
    wrapper = TokenizerWrapper(tokenizer)

    class Generator:
        def encode_chat(self, messages, **options):
            return encode_chat(wrapper, messages, **options)

    record = read(write([CHAT | {"skill": "weather"}]))
    prompt = Question(record).encode(Generator(), thinking=False)
    for tokens in (prompt, prompt_from_record(record, wrapper)):
        assert "Name of a city" in tokenizer.decode(tokens)


def test_tools_survive_the_cache_and_reach_metric_functions(write, cache_folder):
    record = read(write([CHAT]))
    entry = cache.store(print).get_or_make(
        "test",
        "key",
        lambda folder: splits.write_eval_split(folder, splits.EvalSplit([record], 0)),
    )
    assert splits.read_eval_split(entry).records == [record]
    seen = []
    functions.checked_metric(lambda model, rows: seen.extend(rows) or 0.0, "m")(
        MagicMock(), [record]
    )
    assert seen[0]["tools"] == [WEATHER]
