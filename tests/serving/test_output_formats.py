"""Answers of a random model that follow a format: JSON, choices, and forced calls."""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest
from lmx.generation.generator import Generator
from lmx.generation.grammar_matcher import GrammarCompiler
from lmx.generation.kv_cache.prefix import PrefixCache
from lmx.generation.speculative.draft_length import DraftLengthController
from lmx.generation.speculative.prompt_lookup import NGramIndex, PromptLookupProposer
from lmx.serving.engine_thread import ServedModel
from lmx.serving.errors import ApiError
from lmx.serving.output_formats import chat_grammar
from lmx.serving.protocol import ChatCompletionParameters
from lmx.serving.tool_formats import add_tool_format
from tiny_generators import thinking_tokenizer, tiny
from tiny_server import CHAT, COMPLETIONS, TEMPLATE, joined_chat

pytestmark = pytest.mark.fused

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "tag": {"enum": ["red", "blue"]},
    },
    "required": ["n", "tag"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "level": {"type": "integer", "maximum": 9, "minimum": 0}
                },
                "required": ["level"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("dim", "raise")
]
SHORT = {"max_tokens": 40}
LLAMA = """{# <|start_header_id|> {"name": n, "parameters": p} #}"""
THINKING = "{% if add_generation_prompt %}<|end|>\n{% endif %}"


def served(parser="json_tools", template=TEMPLATE, *, lookup=False, mark=None):
    """A function that loads a random model whose tokenizer has a format of calls.

    Args:
        mark: a token in place of the mark of a call.
    """

    def load():
        tokenizer = thinking_tokenizer(template)
        module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
        tokenizer._tool_parser = module.parse_tool_call
        tokenizer._tool_call_start = mark or module.tool_call_start
        tokenizer._tool_call_end = module.tool_call_end
        index = NGramIndex()
        generator = Generator(
            tiny("llama"),
            tokenizer,
            prefix_cache=PrefixCache(10_000_000),
            make_proposer=(lambda _: PromptLookupProposer(index)) if lookup else None,
            draft_length=DraftLengthController(fixed=3),
        )
        return ServedModel(generator)

    return load


@pytest.fixture(scope="module")
def server():
    from tiny_server import TinyServer

    started = TinyServer(served(), max_tokens=300, thinking_budget=20)
    yield started
    assert started.stop() == 0


def chat(**options):
    return {"messages": [{"role": "user", "content": "Hi"}], "temperature": 1} | options


def test_every_answer_follows_its_schema(start):
    """With requests beside it that have none, and with drafts."""
    server = start(served(lookup=True), max_tokens=300)
    bodies = [
        chat(seed=seed, **({"response_format": FORMAT} if seed % 2 else SHORT))
        for seed in range(12)
    ]
    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda b: server.post(CHAT, b).json(), bodies)]
    for seed, answer in enumerate(answers):
        choice = answer["choices"][0]
        if seed % 2:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
        else:
            # Negative control.
            with pytest.raises(json.JSONDecodeError):
                json.loads(choice["message"]["content"])


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"structured_outputs": {"choice": ["red", "blue"]}}, {"red", "blue"}),
        ({"structured_outputs": {"regex": "a{3}"}}, {"aaa"}),
        ({"response_format": {"type": "regex", "pattern": "(x|y)z"}}, {"xz", "yz"}),
    ],
)
def test_completions_follow_formats(server, options, texts):
    assert server.complete(temperature=1, **options)["choices"][0]["text"] in texts


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"dim", "raise"}),
        ({"type": "function", "function": {"name": "raise"}}, {"raise"}),
    ],
)
def test_calls_are_forced(server, choice, names):
    found = set()
    for seed in range(12):
        body = chat(tools=TOOLS, tool_choice=choice, seed=seed) | {"temperature": 20}
        message, reason = _answer(server, body)
        (call,) = message["tool_calls"]
        found.add(call["function"]["name"])
        arguments = json.loads(call["function"]["arguments"])
        parameters = TOOLS[0]["function"]["parameters"]
        jsonschema.validate(arguments, parameters)
        # White space may stand after the chain of thought.
        assert not (message["content"] or "").strip()
        assert reason == "tool_calls"
        if seed:
            continue
        streamed = joined_chat(server.stream(CHAT, body))[0]
        (same,) = streamed["message"]["tool_calls"]
        assert same["function"] == call["function"]
        assert streamed["finish_reason"] == "tool_calls"
    assert found == names
    # Negative control: a random model does not call by itself.
    assert "tool_calls" not in _answer(server, chat(tools=TOOLS, seed=0, **SHORT))[0]


def test_forced_calls_have_no_blanks(start):
    """Small models spent all their tokens on them."""
    tokenizer = start(served()).served.generator.tokenizer
    body = chat(tools=TOOLS, tool_choice="required")
    grammar = chat_grammar(ChatCompletionParameters.parse(body), tokenizer)
    compiled = GrammarCompiler(tokenizer).compile(grammar)

    def takes(text):
        matcher = compiled.start({257})
        tokens = tokenizer.encode(f"<tool_call>\n{text}\n</tool_call>")
        return not any(matcher.advance(token) for token in tokens)

    call = {"name": "raise", "arguments": {"level": 6}}
    assert takes(json.dumps(call))
    assert not takes(json.dumps(call, indent=1))
    assert not takes(json.dumps(call).replace(": 6", ":  6"))
    assert not takes(json.dumps(call).replace("6}", "6 }"))


def bare():
    """A model that writes calls as Llama 3 does, without marks."""
    loaded = served()()
    tokenizer = loaded.generator.tokenizer
    tokenizer._tool_call_start = tokenizer._tool_call_end = None
    tokenizer.chat_template = TEMPLATE + LLAMA
    add_tool_format(tokenizer)
    return loaded


def test_calls_without_marks(start):
    """As Llama 3 writes them: forced, and in place of an answer."""
    server = start(bare, max_tokens=120)
    options = {"thinking_budget": 5, "tools": TOOLS}
    for seed in range(3):
        body = chat(seed=seed, tool_choice="required", **options)
        message, reason = _answer(server, body)
        (call,) = message["tool_calls"]
        parameters = TOOLS[0]["function"]["parameters"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
        assert reason == "tool_calls"
    # The answer of this schema begins as a call does.
    answer = {"type": "object", "properties": {"name": {"const": "x"}}}
    answer |= {"required": ["name"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": answer}}
    kinds = set()
    for seed in range(8):
        body = chat(seed=seed, response_format=named, temperature=5, **options)
        message, _ = _answer(server, body)
        kinds.add("tool_calls" in message)
        if "tool_calls" not in message:
            jsonschema.validate(json.loads(message["content"]), answer)
    assert kinds == {True, False}
    body = chat(structured_outputs={"regex": "a"}, **options)
    assert server.refused(CHAT, body)[1]["param"] == "structured_outputs"


def test_parameters_with_references_are_forced(server):
    """As pydantic writes models in models: each function has definitions of its own."""
    tools = []
    for name, values in (("é", [1, 2]), ("b", [3, 4])):
        definitions = {"level": {"enum": values}}
        schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/level"}}}
        schema |= {"required": ["n"], "additionalProperties": False}
        function = {"name": name, "parameters": schema | {"$defs": definitions}}
        tools.append({"type": "function", "function": function})
    found = set()
    for seed in range(8):
        body = chat(tools=tools, tool_choice="required", seed=seed, temperature=20)
        message, _ = _answer(server, body)
        function = message["tool_calls"][0]["function"]
        found.add(function["name"])
        values = [1, 2] if function["name"] == "é" else [3, 4]
        assert json.loads(function["arguments"])["n"] in values
    assert found == {"é", "b"}


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("parser", ["json_tools", "mistral"])
def test_an_answer_that_fits_or_a_call(start, parser, lookup):
    """A model that has tools and a format: the mark of a call, or the format."""
    mark = "<|im_start|>"
    server = start(served(parser, lookup=lookup, mark=mark), max_tokens=120)
    body = chat(tools=TOOLS, response_format=FORMAT, thinking_budget=5)
    kinds = set()
    for seed in range(9):
        bias = {"logit_bias": {"256": seed}} if seed % 3 else {}
        content = _answer(server, body | bias | {"seed": seed})[0]["content"]
        kinds.add(content.startswith(mark))
        if not content.startswith(mark):
            jsonschema.validate(json.loads(content), SCHEMA)
    assert kinds == {True, False}
    # No tools leave no call.
    none = {"tool_choice": "none", "logit_bias": {"256": 50}, "seed": 1}
    message, _ = _answer(server, body | none)
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_forced_call_leaves_no_answer(server):
    """And is one call, where OpenAI's default allows several."""
    options = {"response_format": FORMAT, "parallel_tool_calls": True}
    body = chat(tools=TOOLS, tool_choice="required", seed=1, **options)
    assert len(_answer(server, body)[0]["tool_calls"]) == 1


def test_choices_without_tools_change_nothing(server):
    expected = _answer(server, chat(seed=1, **SHORT))
    for tools in ({}, {"tools": []}, {"tools": None}):
        for choice in ("none", "auto", None):
            body = chat(seed=1, tool_choice=choice, **tools, **SHORT)
            assert _answer(server, body) == expected


@pytest.mark.filterwarnings("ignore:uniqueItems is not enforced")
def test_a_set_of_pydantic_is_a_list_of_its_items(server):
    class Lamps(pydantic.BaseModel, extra="forbid"):
        rooms: Annotated[set[Literal["den", "hall"]], pydantic.Field(max_length=4)]

    schema = Lamps.model_json_schema()
    assert schema["properties"]["rooms"]["uniqueItems"]
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"tools": [function], "tool_choice": "required"}
    message, _ = _answer(server, chat(**tool, seed=1))
    arguments = message["tool_calls"][0]["function"]["arguments"]
    message, _ = _answer(server, chat(response_format=named, seed=1))
    for text in (arguments, message["content"]):
        assert Lamps.model_validate_json(text).rooms <= {"den", "hall"}


def _answer(server, body):
    choice = server.post(CHAT, body).json()["choices"][0]
    return choice["message"], choice["finish_reason"]


WRONG = [
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_object", "schema": {"minLenght": 1}}},
        "response_format.schema",
    ),
    (
        {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"response_format": FORMAT, "tools": TOOLS}, "response_format"),
    ({"structured_outputs": {"regex": "a{9"}}, "structured_outputs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": False, "stream_options": {}}, "stream_options"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    (
        {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "fly"}},
        },
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": FORMAT, "ignore_eos": True}, None),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools[0]"),
]


def test_a_mark_of_several_tokens_is_not_the_unknown_token():
    tokenizer = thinking_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    tokenizer._tool_call_start = "<call>"
    parameters = ChatCompletionParameters.parse(
        chat(tools=TOOLS, response_format=FORMAT)
    )
    with pytest.raises(ApiError, match="goes with no tools"):
        chat_grammar(parameters, tokenizer)


def test_wrong_formats_are_refused(server):
    for options, param in WRONG:
        status, error = server.refused(CHAT, chat(**options))
        assert (status, error["param"]) == (400, param), error


@pytest.mark.parametrize("lookup", [False, True])
def test_an_answer_follows_its_schema_after_the_chain_of_thought(start, lookup):
    """With a prompt that begins it, and with a model that begins it itself."""
    for template in (TEMPLATE + THINKING, TEMPLATE):
        server = start(served(template=template, lookup=lookup), max_tokens=300)
        forced = {"tools": TOOLS, "tool_choice": "required"}
        for options in ({"response_format": FORMAT}, forced):
            # A model that may begin a chain of thought does.
            bias = {"258": 100}
            body = chat(thinking_budget=12, logit_bias=bias, seed=1, **options)
            message, _ = _answer(server, body)
            assert message["reasoning_content"].count("<|end|>") <= 12
            if options is forced:
                assert message["tool_calls"]
            else:
                jsonschema.validate(json.loads(message["content"]), SCHEMA)


def test_a_switch_of_the_template_leaves_the_chain_of_thought_out(start):
    switch = THINKING.replace("add_generation", "enable_thinking and add_generation")
    server = start(served(template=TEMPLATE + switch), max_tokens=300)
    for options in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        message, _ = _answer(server, chat(response_format=FORMAT, **options))
        assert not message.get("reasoning_content")
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
    # Negative control.
    body = chat(response_format=FORMAT, thinking_budget=5, seed=1)
    assert _answer(server, body)[0]["reasoning_content"]


def test_other_formats_of_calls_are_not_forced(start):
    server = start(served("pythonic"))
    body = chat(tools=TOOLS, tool_choice="required")
    assert server.refused(CHAT, body)[1]["param"] == "tool_choice"


def test_completions_take_formats_of_every_prompt(server):
    body = {"prompt": ["a", "b"], "n": 2, "response_format": FORMAT, "temperature": 1}
    for choice in server.post(COMPLETIONS, body).json()["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
