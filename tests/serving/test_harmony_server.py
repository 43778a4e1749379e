"""gpt-oss over HTTP: a model that plays Harmony back, whole and streamed."""

import json

import pytest
from lmx.generation.generator import Generator
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.serving.engine_thread import ServedModel
from tiny_generators import Played, harmony_tokenizer
from tiny_server import CHAT, joined_chat

pytestmark = pytest.mark.fused

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}{{ tools|length }}{% endif %}<|start|>assistant"
)
ANALYSIS = "<|channel|>analysis<|message|>Hm, hm, hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Yes, it is.<|return|>"
CALL = (
    "<|channel|>commentary to=functions.dim <|constrain|>json<|message|>"
    '{"level": 3}<|call|>'
)
TOOLS = [{"type": "function", "function": {"name": "dim", "parameters": {}}}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
SCHEMA["additionalProperties"] = False
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Hi"}]


def played(text, *, tools=0, lookup=False):
    """A function that loads a model whose answer to the chat is a text."""

    def load():
        tokenizer = harmony_tokenizer(TEMPLATE)
        count = tools or ""
        prompt = f"<|start|>user<|message|>Hi<|end|>{count}<|start|>assistant"
        tokens = tokenizer.encode(prompt + text, add_special_tokens=False)
        index = NGramIndex()
        generator = Generator(
            Played(tokens, len(tokenizer)),
            tokenizer,
            make_proposer=(lambda _: PromptLookupProposer(index)) if lookup else None,
            draft_length=DraftLengthController(fixed=3),
        )
        return ServedModel(generator)

    return load


def answers(server, **body):
    """The answer whole, and as its stream makes it."""
    body = {"messages": MESSAGES, "max_tokens": 200, "temperature": 0} | body
    (choice,) = server.post(CHAT, body).json()["choices"]
    (streamed,) = joined_chat(server.stream(CHAT, body))
    for each in (choice, streamed):
        for call in each["message"].get("tool_calls", ()):
            call.pop("id")
            call.pop("index", None)
    for name, value in streamed["message"].items():
        assert (choice["message"][name] or "") == value
    assert streamed["finish_reason"] == choice["finish_reason"]
    return choice["message"], choice["finish_reason"]


def test_an_answer_without_channels_is_content(start):
    message, reason = answers(start(played("Yes, it is.<|return|>")))
    assert (message["content"], reason) == ("Yes, it is.", "stop")
    # A header that is cut is none.
    message, _ = answers(start(played(FINAL)), max_tokens=4)
    assert message["content"] == ""


@pytest.mark.parametrize("lookup", [False, True])
def test_channels(start, lookup):
    server = start(played(ANALYSIS + FINAL, lookup=lookup), max_tokens=200)
    message, reason = answers(server)
    assert message["reasoning_content"] == "Hm, hm, hm."
    assert (message["content"], reason) == ("Yes, it is.", "stop")
    usage = server.chat("Hi", temperature=0)["usage"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert thought == pytest.approx(len("Hm, hm, hm."), abs=1)
    # A budget ends the analysis; what follows has its own place in the script.
    message, _ = answers(server, thinking_budget=4)
    assert message["reasoning_content"] == "Hm, "


@pytest.mark.parametrize("lookup", [False, True])
def test_calls(start, lookup):
    server = start(played(ANALYSIS + CALL, tools=1, lookup=lookup))
    message, reason = answers(server, tools=TOOLS)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "dim", "arguments": '{"level": 3}'}
    assert message["reasoning_content"] == "Hm, hm, hm."
    assert (message["content"], reason) == (None, "tool_calls")


LEVEL = {"type": "object", "properties": {"level": {"enum": [1, 2]}}}
LEVEL |= {"required": ["level"], "additionalProperties": False}
FORCED = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (("dim", LEVEL), ("stop", {}))
]
DIM = {"type": "function", "function": {"name": "dim"}}


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        ANALYSIS + CALL,
        ANALYSIS + FINAL,
        ANALYSIS + CALL.replace("dim", "off"),
    ],
)
@pytest.mark.parametrize("choice", ["required", DIM])
def test_forced_calls(start, text, choice, lookup):
    server = start(played(text, tools=2, lookup=lookup))
    message, reason = answers(server, tools=FORCED, tool_choice=choice)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "dim"
    assert json.loads(call["function"]["arguments"])["level"] in (1, 2)
    assert message["reasoning_content"]
    assert (message["content"], reason) == (None, "tool_calls")


@pytest.mark.parametrize("budget", [0, 4])
def test_forced_calls_after_a_budget(start, budget):
    server = start(played(ANALYSIS + CALL, tools=2))
    options = {"tools": FORCED, "tool_choice": DIM, "thinking_budget": budget}
    message, _ = answers(server, **options)
    assert message.get("reasoning_content", "") == "Hm, "[:budget]
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("lookup", [False, True])
def test_a_format_with_tools(start, lookup):
    """The final message has the format, or there is a call."""
    options = {"tools": TOOLS, "response_format": FORMAT}
    message, reason = answers(
        start(played(ANALYSIS + CALL, tools=1, lookup=lookup)), **options
    )
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "dim", "arguments": '{"level": 3}'}
    assert (message["content"], reason) == (None, "tool_calls")
    message, reason = answers(
        start(played(ANALYSIS + FINAL, tools=1, lookup=lookup)), **options
    )
    assert json.loads(message["content"])["n"] in (1, 2)
    assert (message.get("tool_calls"), reason) == (None, "stop")


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("budget", [0, 4, 20, 40, 60])
@pytest.mark.parametrize("text", [ANALYSIS + CALL, CALL])
def test_a_budget_cuts_no_call(start, text, budget, lookup):
    """It is that of the analysis. What follows has its own place in the script."""
    server = start(played(text, tools=1, lookup=lookup), max_tokens=200)
    options = {"tools": TOOLS, "response_format": FORMAT, "thinking_budget": budget}
    message, reason = answers(server, **options)
    thought = message.get("reasoning_content") or ""
    assert thought == ("Hm, hm, hm."[:budget] if text != CALL else "")
    if budget >= 20 or text == CALL:
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "dim", "arguments": '{"level": 3}'}
        assert (message["content"], reason) == (None, "tool_calls")


@pytest.mark.parametrize("name", ["get weather", "a<b", "<|call|>"])
def test_a_function_that_no_header_can_name(start, name):
    server = start(played(ANALYSIS + CALL, tools=1))
    tool = {"type": "function", "function": {"name": name}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    status, error = server.refused(CHAT, body)
    assert (status, error["param"]) == (400, "tools")
    assert name in error["message"]


@pytest.mark.parametrize("lookup", [False, True])
def test_a_format_is_that_of_the_final_message(start, lookup):
    server = start(played(ANALYSIS + FINAL, lookup=lookup))
    message, reason = answers(server, response_format=FORMAT)
    assert message["reasoning_content"] == "Hm, hm, hm."
    assert json.loads(message["content"])["n"] in (1, 2)
    assert reason == "stop"
