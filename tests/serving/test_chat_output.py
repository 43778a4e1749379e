"""Completions of chats as content, chain of thought and calls, cut at any character."""

import importlib
import json

import pytest
from lmx.serving.chat_output import ChatOutputParser
from lmx.serving.harmony import END
from lmx.serving.tool_formats import add_tool_format
from tiny_generators import byte_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = {"city": "Paris", "days": 2}
CALLS = {
    "json_tools": '\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n',
    "qwen3_coder": "\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n",
    "mistral": 'weather[ARGS]{"city": "Paris", "days": 2}',
    "pythonic": "[weather(city='Paris', days=2)]",
    "glm47": "weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n",
    "longcat": "weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days"
    "</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n",
    "minimax_m2": '<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n',
    "kimi_k2": "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris", "days": 2}<|tool_call_end|>',
    "gemma4": 'call:weather{city:<|"|>Paris<|"|>,days:2}',
    "function_gemma": "call:weather{city:<escape>Paris<escape>,days:2}",
    "minicpm5": '"weather"><param name="city">Paris</param>'
    '<param name="days">2</param>',
}
THINKING = {
    "think": ("<think>", "</think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "colon": ("<|think:start|>", "<|think:end|>"),
}


def _tokenizer(parser=None, *, added=()):
    """A byte-level tokenizer of a model that thinks or calls."""
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper

    fast = byte_tokenizer()._tokenizer
    fast.add_tokens([*added], special_tokens=False)
    options = {}
    if parser:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        options = {
            "tool_parser": module.parse_tool_call,
            "tool_call_start": module.tool_call_start,
            "tool_call_end": module.tool_call_end,
        }
    return TokenizerWrapper(fast, BPEStreamingDetokenizer, eos_token_ids=[1], **options)


def _message(tokenizer, pieces, *, tools=TOOLS, in_reasoning=False, cut=False):
    """The message of some pieces of text; cut = the last ends at a limit."""
    parser = ChatOutputParser(tokenizer, tools, in_reasoning=in_reasoning)
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    pieces = [*pieces]
    for number, piece in enumerate(pieces):
        for field in parser.add_text(piece, last=number == len(pieces) - 1, cut=cut):
            ((name, value),) = field.items()
            message[name] += value
    assert parser.calls == len(message["tool_calls"])
    return message


def _calls(message):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message["tool_calls"]
    ]


def _cuts(text):
    """The text whole, in characters, and in two pieces at every place."""
    return [[text], [*text], *([text[:i], text[i:]] for i in range(1, len(text)))]


# Calls


@pytest.mark.parametrize("parser", CALLS)
def test_a_call(parser):
    tokenizer = _tokenizer(parser)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    text = f"Let me see. {start}{CALLS[parser]}{end}"
    for pieces in _cuts(text):
        message = _message(tokenizer, pieces)
        assert _calls(message) == [("weather", ARGUMENTS)], pieces
        assert message["content"] == "Let me see. "
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["index"] == 0
    assert call["id"]


TEXTS = {
    "qwen3_coder": ("<function=f>", "<parameter={}>\n{}\n</parameter>", "</function>"),
    "glm47": ("f", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", ""),
    "longcat": (
        "f",
        "<longcat_arg_key>{}</longcat_arg_key><longcat_arg_value>{}</longcat_arg_value>",
        "",
    ),
    "minimax_m2": (
        '<invoke name="f">',
        '<parameter name="{}">{}</parameter>',
        "</invoke>",
    ),
    "minicpm5": ('"f">', '<param name="{}">{}</param>', ""),
}
DEFINITIONS = {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
TYPED = [
    ({"type": "string"}, "007", "007"),
    ({"type": "string"}, "null", "null"),
    ({"type": "string"}, "[1]", "[1]"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "12", "12"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
    ({"$ref": "#/$defs/count"}, "12", 12),
    ({"$ref": "#/$defs/loop"}, "word", "word"),
    ({"allOf": [{"$ref": "#/$defs/count"}]}, "12", 12),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": [1, 2]}, "True", "True"),
    ({"const": True}, "True", True),
    ({"type": "integer"}, "3.0", 3),
    ({"type": "integer"}, "9" * 400, int("9" * 400)),
    ({"type": "integer"}, "many", "many"),
    ({"type": "number"}, "2.5", 2.5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "boolean"}, "false", False),
    ({"type": "array", "items": {"type": "string"}}, '["1"]', ["1"]),
    ({"type": "object"}, "{'a': 1}", {"a": 1}),
    (True, "12", 12),
]


@pytest.mark.parametrize("parser", TEXTS)
def test_arguments_have_the_types_of_the_schema(parser):
    tokenizer = _tokenizer(parser)
    head, argument, tail = TEXTS[parser]
    names = [f"a{number}" for number in range(len(TYPED))]
    properties = {n: schema for n, (schema, _, _) in zip(names, TYPED, strict=True)}
    parameters = {"type": "object", "properties": properties, "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    texts = [argument.format(n, t) for n, (_, t, _) in zip(names, TYPED, strict=True)]
    call = head + "\n".join(texts) + tail
    text = f"{tokenizer.tool_call_start}{call}{tokenizer.tool_call_end}"
    ((_, found),) = _calls(_message(tokenizer, [text], tools=tools))
    expected = {n: value for n, (_, _, value) in zip(names, TYPED, strict=True)}
    assert {n: repr(v) for n, v in found.items()} == {
        n: repr(v) for n, v in expected.items()
    }


@pytest.mark.parametrize("arguments", ["", ', "arguments": null'])
def test_a_call_without_arguments(arguments):
    tokenizer = _tokenizer("json_tools")
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    text = f'{start}{{"name": "weather"{arguments}}}{end}'
    assert _calls(_message(tokenizer, [text])) == [("weather", {})]


@pytest.mark.parametrize("parser", TEXTS)
def test_a_function_without_parameters(parser):
    tokenizer = _tokenizer(parser)
    head, argument, tail = TEXTS[parser]
    call = head + argument.format("a", "x") + tail
    text = f"{tokenizer.tool_call_start}{call}{tokenizer.tool_call_end}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert _calls(_message(tokenizer, [text], tools=tools)) == [("f", {"a": "x"})]


LLAMA = """<|start_header_id|>{"name": "x", "parameters": {}}"""
GRANITE = "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"
PHI = "<|tool|>{{ tools }}<|/tool|>"
OWN = json.dumps({"name": "weather", "arguments": ARGUMENTS})
OTHER = OWN.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("template", "text", "count"),
    [
        (LLAMA, OTHER, 1),
        (LLAMA, f"{OTHER}; {OTHER}", 2),
        (LLAMA, OTHER.replace("{", '{"type": "function", ', 1), 1),
        (GRANITE, f"<|tool_call|>[{OWN}, {OWN}]", 2),
        (PHI, f"<|tool_call|>[{OWN}]<|/tool_call|>", 1),
    ],
)
def test_a_call_in_a_format_of_the_template(template, text, count):
    tokenizer = _tokenizer(added=("<|tool_call|>", "<|/tool_call|>"))
    tokenizer._tokenizer.chat_template = template
    add_tool_format(tokenizer)
    for pieces in _cuts(text):
        message = _message(tokenizer, pieces)
        assert _calls(message) == [("weather", ARGUMENTS)] * count, pieces
        assert message["content"] == ""
    answers = ['{"name": "Paris"}', "{", 'Use {"a": 1} or []', '{"temperature": 4} C']
    for answer in answers if template is LLAMA else ():
        assert _message(tokenizer, [*answer])["content"] == answer
        assert _message(tokenizer, [answer], tools=None)["content"] == answer


def test_other_templates_get_no_format_of_calls():
    for template in (None, "{{ messages }}", "<|tool_call|>", '"parameters": '):
        tokenizer = _tokenizer()
        tokenizer._tokenizer.chat_template = template
        add_tool_format(tokenizer)
        assert not tokenizer.has_tool_calling


@pytest.mark.parametrize("parser", [p for p in CALLS if p != "mistral"])
def test_two_calls_and_text(parser):
    tokenizer = _tokenizer(parser)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    call = f"{start}{CALLS[parser]}{end}"
    text = f"{call}\n{call.replace(':0', ':1')} Done."
    for pieces in ([text], text):
        message = _message(tokenizer, pieces)
        assert _calls(message) == [("weather", ARGUMENTS)] * 2
        assert message["content"].endswith(" Done.")
        assert [c["index"] for c in message["tool_calls"]] == [0, 1]
        assert len({c["id"] for c in message["tool_calls"]}) == 2


# GLM's parser takes every text for a call.
@pytest.mark.parametrize("parser", [p for p in CALLS if p != "glm47"])
def test_a_call_that_does_not_parse_is_text(parser):
    tokenizer = _tokenizer(parser)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    for inner in ("{not a call", ""):
        text = f"See: {start}{inner}{end}"
        for pieces in ([text], text):
            message = _message(tokenizer, pieces)
            assert message["tool_calls"] == []
            assert message["content"] == text, pieces


@pytest.mark.parametrize("parser", [p for p in CALLS if p != "mistral"])
def test_a_call_that_is_cut_is_text(parser):
    """Some parsers take the half of a call for a whole one."""
    tokenizer = _tokenizer(parser)
    text = f"See: {tokenizer.tool_call_start}{CALLS[parser]}"
    for length in range(len("See: "), len(text) - 1, 3):
        message = _message(tokenizer, [text[:length]], cut=True)
        assert message["tool_calls"] == [], text[:length]
        assert message["content"] == text[:length]
    # A model may end its turn in place of the call.
    assert _calls(_message(tokenizer, [text])) == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("parser", CALLS)
def test_without_tools_a_call_is_text(parser):
    tokenizer = _tokenizer(parser)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    text = f"See: {start}{CALLS[parser]}{end}"
    for tools in (None, []):
        for pieces in ([text], text):
            assert _message(tokenizer, pieces, tools=tools)["content"] == text


# Chains of thought


@pytest.mark.parametrize("kind", THINKING)
def test_a_chain_of_thought(kind):
    start, end = THINKING[kind]
    tokenizer = _tokenizer(added=(start, end))
    text = f"{start}\nIs 1 < 2?\n{end}\n\nYes, <b>it is</b>."
    for pieces in _cuts(text):
        message = _message(tokenizer, pieces)
        assert message["reasoning_content"] == "\nIs 1 < 2?\n", pieces
        assert message["content"] == "\n\nYes, <b>it is</b>."
    # The prompt has begun it.
    text = text.removeprefix(start)
    for pieces in ([text], text):
        message = _message(tokenizer, pieces, in_reasoning=True)
        assert message["reasoning_content"] == "\nIs 1 < 2?\n"
    # Negative control: it has not.
    assert _message(tokenizer, [text])["content"] == text
    # It is cut.
    for length in range(len(start), len(text), 4):
        message = _message(tokenizer, [(start + text)[:length]])
        whole = message["reasoning_content"] + message["content"]
        assert start not in whole


def test_channels():
    tokenizer = _tokenizer(added=("<|channel>", "<channel|>"))
    text = "<|channel>thought\nHm.<channel|>Yes."
    for pieces in _cuts(text):
        message = _message(tokenizer, pieces)
        assert (message["reasoning_content"], message["content"]) == ("\nHm.", "Yes.")


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
HARMONY += ("<|return|>", "<|constrain|>")
HM, YES = "<|channel|>analysis<|message|>Hm. ", "<|channel|>final<|message|>Yes."
NEXT, COMMENT = "<|end|><|start|>assistant", "<|channel|>commentary"
TO = "to=functions.weather"
HEAD, ARGS = f"{COMMENT} {TO}<|message|>", json.dumps(ARGUMENTS)


def harmony():
    tokenizer = _tokenizer(added=HARMONY)
    add_tool_format(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (HM + NEXT + YES, "Hm. ", "Yes.", 0),
        (YES + "<|return|>", "", "Yes.", 0),
        (HM + NEXT + HM + NEXT + YES, "Hm. Hm. ", "Yes.", 0),
        # The last channel of a header counts.
        (f"<|channel|>analysis{YES}", "", "Yes.", 0),
        (f"{HM}{NEXT}{COMMENT}<|message|>So: {NEXT}{YES}", "Hm. ", "So: Yes.", 0),
        # The function stands after the channel or before it.
        (f"{COMMENT} {TO} <|constrain|>json<|message|>{ARGS}", "", "", 1),
        (f"{HM}{NEXT} {TO}{COMMENT} json<|message|>{ARGS}<|call|>", "Hm. ", "", 1),
        (HEAD + ARGS + NEXT + HEAD + ARGS, "", "", 2),
        # A function that only the model knows, and a channel that nobody knows.
        ("<|channel|>analysis to=python code<|message|>1+1", "1+1", "", 0),
        ("<|channel|>other<|message|>a <b>", "", "a <b>", 0),
        ("<|message|>Hi", "", "Hi", 0),
        # No call.
        (HEAD + "{a<|call|>", "", HEAD + "{a<|call|>", 0),
        (HEAD + "[1]<|call|>", "", HEAD + "[1]<|call|>", 0),
    ],
)
def test_channels_of_harmony(text, reasoning, content, calls):
    tokenizer = harmony()
    for pieces in _cuts(text):
        message = _message(tokenizer, pieces)
        assert _calls(message) == [("weather", ARGUMENTS)] * calls, pieces
        found = message["reasoning_content"], message["content"]
        assert found == (reasoning, content), pieces
    # Without tools, a call is text.
    without = _message(tokenizer, [text], tools=None)["content"]
    assert without == (ARGS * calls or content.removeprefix(HEAD).replace(END, ""))


def test_a_call_of_harmony_that_is_cut_is_text():
    text = HEAD + ARGS
    for length in range(len(text)):
        message = _message(harmony(), [*text[:length], ""], cut=True)
        assert message["tool_calls"] == []
        assert message["content"] == (text[:length] if length >= len(HEAD) else "")


def test_thoughts_and_calls():
    tokenizer = _tokenizer("json_tools", added=THINKING["think"])
    call = f"<tool_call>{CALLS['json_tools']}</tool_call>"
    text = f"<think>I call.</think>\n{call}"
    for pieces in ([text], text):
        message = _message(tokenizer, pieces)
        assert message["reasoning_content"] == "I call."
        assert _calls(message) == [("weather", ARGUMENTS)]
