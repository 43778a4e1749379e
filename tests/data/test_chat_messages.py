"""Columns and keys that carry meaning are used, or the example is skipped with the
reason."""

import json

import pytest
from lmx.data import dataset, splits
from lmx.data.record_formats import unknown_keys
from lmx.errors import UserError
from reading import read, skip_reason
from test_tokenization import CHATML, build_tokenizer, encode_one, trained_texts

USER = {"role": "user", "content": "Is it warm?"}
ANSWER = {"role": "assistant", "content": "Yes."}
OTHER = {"role": "assistant", "content": "No."}
CHAT = {"messages": [USER, ANSWER]}
EARLIER = [USER, OTHER, USER]
FUNCTION = {"name": "weather", "arguments": {"in": "Rome"}}
SYSTEM = {"role": "system", "content": "Be brief."}
LABEL = "it has a label; data for kto has prompt, completion and"
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
AS_TEXT = json.dumps(FUNCTION)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": EARLIER, "completion": [ANSWER]},
        {"prompt": EARLIER, "completion": "Yes."},
        {"prompt": EARLIER, "completion": [ANSWER], "label": True},
        {"prompt": EARLIER, "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [*EARLIER, ANSWER], "rejected": [*EARLIER, OTHER]},
        {"prompt": EARLIER, "chosen": [ANSWER]},
        {"instruction": "Is it warm?", "output": "Yes.", "history": [["Hi", "Ho"]]},
        {"messages": [USER, OTHER | {"training": False}, USER, ANSWER]},
        {"messages": [USER, OTHER | {"train": False}, USER, ANSWER]},
        *(
            {"messages": [USER, OTHER | {key: flag}, USER, ANSWER]}
            for key in ("weight", "trainable", "loss", "loss_mask")
            for flag in (0, False)
        ),
        {"prompt": EARLIER, "chosen": [*EARLIER, ANSWER]},
    ],
    ids=str,
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_only_completions_are_trained(write, record, system):
    tokenizer = build_tokenizer(CHATML)
    record = read(write([record | {"system": system}]))
    example = encode_one(record, tokenizer)
    assert trained_texts(example, tokenizer) == ["Yes.<|im_end|>"]
    assert len(record.messages) == 4 + (system is not None)


@pytest.mark.parametrize(
    "message",
    [
        CALLED,
        CALLED | {"content": None},
        {"role": "assistant", "tool_calls": json.dumps(CALLED["tool_calls"])},
        {"role": "assistant", "tool_calls": AS_TEXT},
        {"role": "assistant", "tool_calls": [FUNCTION]},
        {"role": "assistant", "content": None, "function_call": FUNCTION},
        {"from": "gpt", "function_call": FUNCTION | {"arguments": '{"in":"Rome"}'}},
        {"from": "function_call", "value": AS_TEXT},
    ],
    ids=str,
)  # fmt: skip
def test_calls_of_all_kinds_become_tool_calls(write, message):
    assert read(write([{"messages": [USER, message]}])).messages == (USER, CALLED)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        *(({"label": label}, LABEL) for label in (False, True, 0, 1, -1, "false", "1")),
        ({"kto_tag": False}, LABEL),
        ({"desirable": "true"}, LABEL),
        ({"kto_tag": True, "label": False}, "it has label and kto_tag, which mean the"),
        ({"conversations": [ANSWER]}, "it has messages and conversations, which mean"),
        ({"trainable": False}, "it has trainable: false"),
        ({"loss": "False"}, "it has loss: false"),
        ({"loss_mask": [0, 1]}, "it has loss_mask: [0, 1]"),
        ({"weight": 0}, "it has weight: 0"),
        ({"refusal": "No."}, "it has refusal; the text of an answer is content"),
        ({"split": "test"}, "its column split is test, not train"),
        ({"images": ["a.png"]}, "it has images; lmx trains on text"),
        ({"video": "a.mp4"}, "it has video; lmx trains on text"),
        ({"weight": 0.5}, "it has the weight 0.5; lmx has no weights"),
        ({"train": False}, "it has train: false"),
        ({"history": [["a", "b"]]}, "it has history, which only instruction"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs is a list, not an obj"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs has tools"),
        ({"messages": [USER, ANSWER | {"image": "a"}]}, "message 2 has image; lmx"),
        (
            {"messages": [USER, ANSWER | {"training_detail": [{}]}]},
            "message 2 has training_detail; lmx trains whole turns",
        ),
        (
            {"messages": [USER, ANSWER | {"training": "no"}]},
            "message 2 has training: 'no', not 0, 1, true or false",
        ),
        *(
            ({"messages": [USER, ANSWER | extra]}, f"message 2 {reason}")
            for extra, reason in (
                ({"refusal": "No."}, "has refusal; the text of an answer is content"),
                ({"loss": "no"}, "has loss: 'no', not 0, 1, true or false"),
                ({"loss_mask": [0]}, "has loss_mask: [0], not 0, 1, true or false"),
                ({"value": "No."}, "has content and value, which mean the same"),
                ({"from": "human"}, "has role and from, which mean the same"),
                (
                    {"tool_calls": [FUNCTION], "function_call": CALLED},
                    "has tool_calls and function_call, which mean the same",
                ),
            )
        ),
        (
            {"messages": [USER, ANSWER | {"tool_calls": "weather"}]},
            "message 2: tool_calls is text that is not JSON",
        ),
        # It would be read as a call without arguments.
        (
            {
                "messages": [
                    USER,
                    CALLED
                    | {"tool_calls": [{"name": "weather", "parameters": {"in": "R"}}]},
                ]
            },
            "message 2: a tool call has parameters and no arguments",
        ),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"function": {}}]}]},
            "message 2: a tool call has no function with a name",
        ),
        ({"messages": [USER, ANSWER | {"content": 4}]}, "message 2 is a number, not"),
        (
            {"messages": [USER, ANSWER | {"weight": 0}]},
            "no assistant turn with content",
        ),
        *(
            (
                {"messages": [USER, ANSWER | {"weight": weight}]},
                f"message 2 has weight: {weight!r}, not 0, 1, true or false",
            )
            for weight in (0.5, 2, "0", [0])
        ),
        ({"system": {"text": "Be brief."}}, "system is an object, not text"),
        ({"tools": "a hammer"}, "tools is text that is not JSON"),
        ({"tools": '"a hammer"'}, "tools is not a list of objects"),
        ({"tools": ["a hammer"]}, "tools is not a list of objects"),
        ({"tools": {"name": "weather"}}, "tools is not a list of objects"),
    ],
)
def test_what_lmx_does_not_train_skips_the_example(write, extra, reason):
    assert skip_reason(write, CHAT, CHAT | extra).startswith(reason)
    with pytest.raises(UserError, match=r"no example (is valid|can be read)"):
        list(dataset.RecordReader(write([CHAT | extra])))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{city}", "arguments is text that is not JSON"),
        ('{"city": ', "arguments is text that is not JSON"),
        ('{"in": 1, "in": 2}', "arguments: an object has the key 'in' twice"),
        (json.dumps(json.dumps(FUNCTION["arguments"])), "is text, not an object"),
        ('["Rome"]', "arguments is a list, not an object"),
        (["Rome"], "arguments is a list, not an object"),
        (0, "arguments is a number, not an object"),
        (False, "arguments is a boolean, not an object"),
    ],
)
def test_arguments_are_an_object(write, arguments, reason):
    call = {"function": FUNCTION | {"arguments": arguments}}
    bad = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    found = skip_reason(write, CHAT, bad)
    assert found.startswith("message 2: a tool call: ")
    assert found.endswith(reason)


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        ([SYSTEM], (SYSTEM, USER, ANSWER)),
        ([USER, OTHER], (USER, OTHER, USER, ANSWER)),
        ([USER], (USER, ANSWER)),
        (" Is it warm?\n", (USER, ANSWER)),
        ("", (USER, ANSWER)),
        ("Is it cold?", "chosen begins with another prompt than the column prompt"),
        ([SYSTEM, USER], "chosen begins with another prompt than the column prompt"),
    ],
    ids=str,
)
def test_prompt_beside_a_conversation_is_repeated_or_comes_before_it(
    write, prompt, messages
):
    if isinstance(messages, str):
        assert skip_reason(write, PAIR, PAIR | {"prompt": prompt}) == messages
        return
    record = read(write([PAIR | {"prompt": prompt}]))
    assert record.messages == messages
    assert record.rejected == (*messages[:-1], OTHER)
    assert record.prompt_messages == len(messages) - 1


PAIR = {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
INSTRUCTION = {"instruction": "a", "output": "b"}
OTHER_PROMPT = [USER | {"content": "?"}, OTHER]


@pytest.mark.parametrize(
    ("good", "extra", "reason"),
    [
        (PAIR, {"rejected": OTHER_PROMPT}, "have different prompts"),
        (PAIR, {"rejected": [USER, ANSWER, USER, OTHER]}, "is the start of the other"),
        (INSTRUCTION, {"label": 0}, f"{LABEL} label"),
        (INSTRUCTION, {"history": ["a"]}, "history is not a list of pairs"),
        (INSTRUCTION, {"history": {"a": "b"}}, "history is an object, not a list"),
    ],
)
def test_pairs_and_instructions_that_cannot_be_read_are_skipped(
    write, good, extra, reason
):
    assert reason in skip_reason(write, good, good | extra)


def test_unknown_columns_and_keys_are_named_once(write):
    row = {"messages": [USER | {"time": 3}, ANSWER], "id": 7, "source": "web"}
    reader = dataset.RecordReader(write([row | {"id": None, "empty": []}, row]))
    list(reader)
    assert reader.stats.unknown == ("id", "messages.time", "source")
    lines = []
    splits.log_read_stats("train", reader.stats, lines.append, lines.append)
    assert lines[1].endswith("keys that lmx does not use: id, messages.time, source")
    assert len(lines) == 2
    assert not list(unknown_keys(CHAT, "chat"))
    # OpenAI's logs have the key in every answer.
    read_all = {"messages": [USER, ANSWER | {"refusal": "", "loss": True}]}
    assert not list(unknown_keys(read_all | {"train": 1, "loss": None}, "chat"))
    assert [*unknown_keys(read_all | {"label": "news", "loss": 2.5}, "chat")] == [
        *("label", "loss")
    ]


def test_chat_template_kwargs_reach_the_template(write):
    tokenizer = build_tokenizer("{{ tone }}" + CHATML)
    record = read(write([CHAT | {"chat_template_kwargs": {"tone": "Kind"}}]))
    example = encode_one(record, tokenizer)
    assert tokenizer.decode(example.tokens).startswith("Kind<|im_start|>")
