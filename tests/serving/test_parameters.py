"""Every parameter: what it changes, and which values are refused."""

import json
import time

import pytest
from lmx.serving.errors import ApiError
from lmx.serving.protocol import (
    IGNORED,
    ChatCompletionParameters,
    CompletionParameters,
    GenerationParameters,
    parse_body,
)
from tiny_server import CHAT, COMPLETIONS

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hello"}}
IGNORED_VALUES = {name: "x" for name in IGNORED} | {
    "store": True,
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "Hi"},
    # No limit, as without it.
    "max_tokens": -1,
}
# Parameters with values of which each is refused, and where.
BOTH = {
    "model": [1],
    "max_tokens": [0, -2, 1.5, "8", True, 2**40],
    "min_tokens": [-1, "5", 1.5, True, 2**40],
    "temperature": [-0.1, "1", True, 1e999, 101],
    "top_p": [0, 1.1, "1"],
    "top_k": [-2, 1.5, "3"],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, "1"],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "logit_bias": [{"5": 101}, {"x": 1}, {"5": "1"}, {"-1": 1}, [5], {"999": 1}],
    "seed": ["1", 1.5, 2**64, -(2**63) - 1],
    "stop_token_ids": [5, [-1], ["5"], [1] * 129],
    "modalities": [["audio"], "text"],
    "stop": ["", ["a", ""], ["a"] * 17, "a" * 1001, 5, ["a", 5]],
    "n": [0, 129, "2", 1.0],
    "stream": ["true", 1],
    "stream_options": [True, {"include_usage": 1}],
    "ignore_eos": ["yes"],
    "priority": [1001, -1001, "1"],
}
ONLY = {
    CHAT: {
        "messages": [[], "Hi", [5], [{"content": "x"}], [{"role": "user"}]],
        "max_completion_tokens": [0, "5"],
        "logprobs": [3],
        "top_logprobs": [-1, 21, True],
        "tools": [{}, [5], [{"type": "function"}]],
        "parallel_tool_calls": ["no"],
        "thinking_budget": [-1, "5", 1.5, 3],
        "chat_template_kwargs": [[]],
    },
    COMPLETIONS: {
        "prompt": [5, None, [], "", [""], [[]], [-1], [260], [2**40], ["a", 5], {}],
        "echo": ["yes"],
        "logprobs": [-1, 21, True],
        "best_of": [2],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_value_is_refused_by_its_name(server, path):
    cases = BOTH | ONLY[path]
    for name, value in ((n, v) for n, values in cases.items() for v in values):
        # As text, because clients do not send an infinite number.
        body = json.dumps(BODIES[path] | {name: value}).replace("Infinity", "1e999")
        response = server.client.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        error = response.json()["error"]
        assert response.status_code == (404 if error["code"] else 400), (name, error)
        assert error["param"].split(".")[0].split("[")[0] == name, value
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", BODIES)
def test_unknown_parameters_are_refused(server, path):
    for name in ("temprature", "suffix", "x" * 500):
        status, error = server.refused(path, BODIES[path] | {name: 1})
        assert (status, error["code"]) == (400, "unknown_parameter")
        assert error["param"][:90] == name[:90]
    status, error = server.refused(path, BODIES[path] | {"stream_options": {"x": 1}})
    assert (status, error["param"]) == (400, "stream_options.x")


def test_every_parameter_has_wrong_values():
    """A parameter that is added needs a case."""
    untyped = {"response_format", "structured_outputs", "reasoning_effort"}
    covered = {*BOTH, *IGNORED, *untyped, "tool_choice"}
    kinds = {CHAT: ChatCompletionParameters, COMPLETIONS: CompletionParameters}
    for path, kind in kinds.items():
        assert {*kind.model_fields} - covered == {*ONLY[path]} - covered


@pytest.mark.parametrize("path", BODIES)
def test_parameters_that_only_tune_change_nothing(server, path):
    options = {"seed": 5, "temperature": 1.0}
    plain = server.post(path, BODIES[path] | options).json()["choices"]
    answer = server.post(path, BODIES[path] | options | IGNORED_VALUES).json()
    assert answer["choices"] == plain
    status, _ = server.refused(path, BODIES[path] | {"metadata": 5})
    assert status == 400


def test_min_tokens(server):
    ends = {"stop_token_ids": [*range(0, 256, 2)], "max_tokens": 12}
    texts = {least: server.complete(min_tokens=least, **ends) for least in (0, 5, 12)}
    counts = {n: each["usage"]["completion_tokens"] for n, each in texts.items()}
    assert counts[0] < 5 < counts[5] <= counts[12] == 12
    assert texts[12]["choices"][0]["finish_reason"] == "length"
    # Stop texts, too.
    stop = server.complete()["choices"][0]["text"][:1]
    chat = server.chat(min_tokens=12, stop=[stop], **ends)
    assert chat["usage"]["completion_tokens"] == 12
    assert server.complete(stop=stop)["choices"][0]["text"] == ""
    longer = server.complete(stop=stop, min_tokens=3)["choices"][0]["text"]
    assert longer.startswith(stop)
    for body in ({"max_tokens": 4}, {"max_tokens": 4, "n": 2}):
        status, error = server.refused(CHAT, BODIES[CHAT] | body | {"min_tokens": 5})
        assert (status, error["param"]) == (400, "min_tokens")
    # More than the server gives, or than there is room for.
    for body in ({"min_tokens": 17}, {"min_tokens": 399, "max_tokens": 399}):
        status, error = server.refused(COMPLETIONS, {"prompt": "Hello"} | body)
        assert (status, error["param"]) == (400, "min_tokens")


def _text(server, **body):
    options = {"max_tokens": 24, "seed": 1, "ignore_eos": True}
    return server.complete(**(options | body))["choices"][0]["text"]


SAMPLED = {"temperature": 1.5}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({}, {"temperature": 2.0}),
        (SAMPLED, {"top_p": 0.05}),
        (SAMPLED, {"top_k": 1}),
        (SAMPLED, {"min_p": 0.9}),
        ({}, {"repetition_penalty": 3.0}),
        ({}, {"presence_penalty": 2.0}),
        ({}, {"frequency_penalty": 2.0}),
        ({}, {"logit_bias": {"40": 100}}),
        (SAMPLED, {"seed": 2}),
        ({}, {"max_tokens": 3}),
        ({}, {"stop_token_ids": [*range(0, 256, 2)]}),
    ],
    ids=str,
)
def test_a_value_changes_the_completion(server, base, change):
    assert _text(server, **base, **change) != _text(server, **base)
    # Negative control: the same request gives the same text.
    assert _text(server, **base, **change) == _text(server, **base, **change)


def test_values_that_mean_no_change(server):
    neutral = {
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "stop": [],
        "n": 1,
        "priority": 5,
    }
    absent = dict.fromkeys([*neutral, "stream", "stream_options", "user"], None)
    plain = _text(server, **SAMPLED)
    assert _text(server, **SAMPLED, **neutral) == plain
    assert _text(server, **SAMPLED, **(neutral | {"top_k": 0})) == plain
    assert _text(server, **SAMPLED, **(neutral | {"top_k": 2**40})) == plain
    assert _text(server, **SAMPLED, **absent) == plain


def test_limits_of_tokens(server):
    def tokens(answer):
        choice = answer["choices"][0]
        return answer["usage"]["completion_tokens"], choice["finish_reason"]

    options = {"ignore_eos": True}
    assert tokens(server.chat(**options)) == (16, "length"), "the server's limit"
    for names in (["max_tokens"], ["max_completion_tokens"]):
        assert tokens(server.chat(**options, **dict.fromkeys(names, 4))) == (
            4,
            "length",
        )
    # The newer name counts.
    answer = server.chat(**options, max_tokens=9, max_completion_tokens=3)
    assert tokens(answer) == (3, "length")
    # The last token needs no position.
    prompt = [65] * 390
    assert tokens(server.complete(prompt, max_tokens=2**31, **options)) == (
        11,
        "length",
    )
    status, error = server.refused(COMPLETIONS, {"prompt": [65] * 401})
    assert (status, error["param"]) == (400, "prompt")
    assert error["code"] == "context_length_exceeded"
    status, error = server.refused(
        CHAT, {"messages": [{"role": "user", "content": "x" * 401}]}
    )
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


BOMBS = {
    "prompt": {"prompt": [None] * 400_000},
    "list of lists": {"prompt": [[None] * 400_000]},
    "logit_bias": {"logit_bias": {f"x{i}": 1 for i in range(200_000)}},
    "stream_options": {"stream_options": {f"x{i}": 1 for i in range(200_000)}},
    "stop": {"stop": [1] * 400_000},
    "unknown": {f"x{i}": 1 for i in range(200_000)},
}


@pytest.mark.parametrize("name", BOMBS)
def test_many_wrong_values_are_one_error(name):
    """Two million errors took 22 seconds, in which nobody else was answered."""
    start = time.process_time()
    with pytest.raises(ApiError):
        CompletionParameters.parse({"prompt": "a"} | BOMBS[name])
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": "\xff"}', "not JSON in UTF-8"),
        (rb'{"a": "\ud83d"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 300 + b"]" * 300, "200 levels"),
        (b'{"a":' * 250 + b"1" + b"}" * 250, "200 levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
    ids=range(10),
)
def test_bodies_that_are_no_json(data, words):
    with pytest.raises(ApiError, match=words) as raised:
        parse_body(data)
    assert raised.value.status == 400
    assert len(raised.value.message) < 500


def test_bodies_that_are_json():
    assert parse_body(rb'{"a": "\ud83d\ude42"}') == {"a": "🙂"}
    assert parse_body(b"[" * 150 + b"]" * 150)
    for value in (5, [], "x", None):
        with pytest.raises(ApiError, match="no JSON object"):
            GenerationParameters.parse(value)


def test_the_older_names_of_tools():
    function = {"name": "f", "parameters": None}
    body = {"messages": MESSAGES, "functions": [function], "function_call": "auto"}
    parsed = ChatCompletionParameters.parse(body)
    assert parsed.tools == [{"type": "function", "function": function}]
    assert parsed.tool_choice == "auto"
    named = ChatCompletionParameters.parse(body | {"function_call": {"name": "f"}})
    assert named.tool_choice == {"type": "function", "function": {"name": "f"}}
    absent = {"messages": MESSAGES, "functions": None, "function_call": None}
    assert ChatCompletionParameters.parse(absent).tools is None
    for wrong, param in (
        ({"functions": {}}, "functions"),
        ({"tools": [{}]}, "functions"),
        ({"tool_choice": "none"}, "function_call"),
    ):
        with pytest.raises(ApiError) as refused:
            ChatCompletionParameters.parse(body | wrong)
        assert refused.value.param == param


def test_tokens_of_prompts_and_messages(server):
    chat = {"messages": MESSAGES, "max_tokens": 1}
    usage = server.chat("Hello", max_tokens=1)["usage"]
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert tokens["count"] == len(tokens["tokens"]) == usage["prompt_tokens"]
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>user\nHello<|im_end|>")
    tokens = server.post("/tokenize", {"prompt": "Hi é"}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "Hi é"}
    assert server.client.get("/version").json()["version"].count(".") == 2
    # Without /v1.
    assert server.post("/chat/completions", chat).status_code == 200
    assert server.client.get("/models").status_code == 200
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_sp"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [2**20]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        assert server.refused(path, body)[1]["param"].startswith(param)
