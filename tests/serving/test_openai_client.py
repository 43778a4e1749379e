"""The official client of OpenAI drives the server."""

import json
from itertools import pairwise
from typing import Literal

import pytest
from pydantic import BaseModel
from tiny_generators import VOCABULARY, byte_tokenizer
from tiny_server import load

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
            "required": ["left", "right"],
            "additionalProperties": False,
        },
    },
}


def _client(server, **options):
    options = {"api_key": "none", "max_retries": 0} | options
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


@pytest.fixture(scope="module")
def client(server):
    with _client(server) as client:
        yield client


def test_chats(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    answer = client.chat.completions.create(
        **options, n=2, seed=5, temperature=1.0, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, second = answer.choices
    assert first.message.content != second.message.content
    assert len(first.logprobs.content) == 12
    assert len(first.logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens == 24
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    again = client.chat.completions.create(**options, seed=6, temperature=1.0)
    assert again.choices[0].message.content == second.message.content
    # A character in the middle ends it.
    text = first.message.content
    stop = next(c for c in text[2:] if c.isascii())
    cut = client.chat.completions.create(**options, seed=5, temperature=1.0, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_streams(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    whole = client.chat.completions.create(**options).choices[0].message.content
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole
    assert chunks[-1].usage.completion_tokens == 12
    # The client's own helper takes no completion that was cut.
    with client.chat.completions.stream(**options) as events:
        with pytest.raises(openai.LengthFinishReasonError) as cut:
            events.get_final_completion()
        assert cut.value.completion.choices[0].message.content == whole
    completion = client.completions.create(model="tiny", prompt="Hello", max_tokens=9)
    stream = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=9, stream=True
    )
    assert "".join(c.choices[0].text for c in stream) == completion.choices[0].text


def test_models_and_errors(server, client, start):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "lmx"
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="tiny", messages=MESSAGES, extra_body={"temprature": 1})
    assert bad.value.code == "unknown_parameter"
    with pytest.raises(openai.NotFoundError) as missing:
        create(model="gpt-4o", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    closed = start(http={"api_key": "right"}, max_requests=1)
    with _client(closed) as wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with _client(closed, api_key="right") as right:
        assert right.models.list()
        step = closed.engine._step
        closed.engine._step = None
        with pytest.raises(openai.InternalServerError):
            right.completions.create(model="tiny", prompt="x")
        closed.engine._step = step
        busy = right.completions.create(
            model="tiny", prompt="x", max_tokens=390, stream=True
        )
        with pytest.raises(openai.RateLimitError) as refused:
            right.completions.create(model="tiny", prompt="x")
        assert refused.value.response.headers["retry-after"]
        busy.close()


# Tools


class Follows:
    """A model without weights that knows which token comes after another.

    It is what a model has learned here: a question is followed by a call, the result
    of a tool by an answer.
    """

    def __init__(self, tokenizer, after):
        import mlx.core as mx

        size = len(tokenizer)
        table = [after.get(token, 0) for token in range(size)]
        self._table, self._size = mx.array(table), size
        mx.eval(self._table)

    def __call__(self, tokens, cache=None):
        import mlx.core as mx

        follows = self._table[tokens][..., None] == mx.arange(self._size)
        return follows.astype(mx.float32)

    def make_cache(self):
        return []


def _calling():
    """A generator that calls a tool, and answers with its result."""
    from lmx.generation.generator import Generator
    from mlx_lm.tool_parsers import json_tools

    parts = {
        "<question>": [
            "I add.",
            "<tool_call>",
            '\n{"name": "add", ',
            '"arguments": {"left": 2, "right": 3}}\n',
            "</tool_call>",
            "<|im_end|>",
        ],
        "<result>": ["The sum ", "is 5.", "<|im_end|>"],
    }
    template = (
        "{% if tools %}{{ tools | length }}{% endif %}"
        "{% for m in messages %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"
        "{% endfor %}{% endfor %}"
        "{{ '<result>' if messages[-1].role == 'tool' else '<question>' }}"
    )
    tokenizer = byte_tokenizer(template=template)
    tokenizer.add_tokens(
        [p for k, v in parts.items() for p in (k, *v) if p != "<|im_end|>"]
    )
    assert len(tokenizer) > VOCABULARY
    after = {}
    for start, chain in parts.items():
        ids = [tokenizer.convert_tokens_to_ids(part) for part in (start, *chain)]
        after |= dict(pairwise(ids))
    wrapped = type(tokenizer)(
        tokenizer._tokenizer,
        eos_token_ids=[*tokenizer.eos_token_ids],
        tool_parser=json_tools.parse_tool_call,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
    )
    return Generator(Follows(wrapped, after), wrapped)


@pytest.fixture(scope="module")
def calling():
    from tiny_server import TinyServer

    server = TinyServer(load(_calling))
    yield server
    server.stop()


@pytest.mark.parametrize("streams", [False, True])
def test_tools_in_two_rounds(calling, streams):
    with _client(calling) as client:
        messages = [{"role": "user", "content": "2 + 3?"}]
        options = {"model": "tiny", "tools": [TOOL], "messages": messages}
        message, reason = _answer(client, streams, **options)
        assert reason == "tool_calls"
        assert message.content == "I add."
        (call,) = message.tool_calls
        assert call.function.name == "add"
        arguments = json.loads(call.function.arguments)
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": str(arguments["left"] + arguments["right"]),
            }
        )
        message, reason = _answer(client, streams, **options)
        assert (message.content, reason) == ("The sum is 5.", "stop")
        assert not message.tool_calls


@pytest.mark.parametrize("streams", [False, True])
def test_forced_calls_have_tags_of_one_token(calling, streams):
    """As Qwen's; llguidance does not take their tokens for text."""
    with _client(calling) as client:
        options = {"model": "tiny", "tools": [TOOL], "messages": MESSAGES}
        options |= {"tool_choice": "required", "max_tokens": 200}
        message, reason = _answer(client, streams, **options)
        (call,) = message.tool_calls
        assert (call.function.name, reason) == ("add", "tool_calls")
        assert json.loads(call.function.arguments).keys() == {"left", "right"}
        assert not message.content


def test_parsed_answers_beside_tools(calling):
    class Sum(BaseModel):
        value: Literal[4, 5]

    with _client(calling) as client:
        strict = TOOL | {"function": TOOL["function"] | {"strict": True}}
        for tools in ([], [strict]):
            options = {"tools": tools} if tools else {}
            answer = client.chat.completions.parse(
                model="tiny", messages=MESSAGES, response_format=Sum, **options
            )
            assert answer.choices[0].message.parsed.value in (4, 5)


def test_arguments_of_an_earlier_call(calling):
    """Templates take them as an object: models call functions without arguments."""
    good = '{"left": 2}', "", " ", "null", None, "missing"
    for arguments, reason in (
        *((text, None) for text in good),
        ("{left", "arguments is text that is not JSON"),
        ('"{}"', "arguments is text, not an object"),
        ("[2]", "arguments is a list, not an object"),
    ):
        function = {"name": "add", "arguments": arguments}
        if arguments == "missing":
            del function["arguments"]
        call = {"id": "1", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
        body = {"messages": messages, "tools": [TOOL]}
        response = calling.client.post("/v1/chat/completions", json=body)
        if reason is None:
            assert response.status_code == 200, response.text
            continue
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages[1]")
        assert error["message"] == f"message 2: a tool call: {reason}"


def _answer(client, streams, **options):
    if streams:
        with client.chat.completions.stream(**options) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**options).choices[0]
    return choice.message, choice.finish_reason


def test_the_choice_of_tools(calling):
    with _client(calling) as client:
        create = client.chat.completions.create
        options = {"model": "tiny", "messages": MESSAGES}
        # Without tools, and when none may be called, the markers are text.
        for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            message = create(**options, **more).choices[0].message
            assert message.tool_calls is None
            assert "<tool_call>" in message.content
        # The call is cut.
        cut = create(**options, tools=[TOOL], max_tokens=3).choices[0]
        assert cut.finish_reason == "length"
        assert cut.message.tool_calls is None
        one = create(**options, tools=[TOOL], parallel_tool_calls=False).choices[0]
        assert one.finish_reason == "tool_calls"
        assert len(one.message.tool_calls) == 1


def test_tools_of_a_model_without_a_format(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    assert refused.value.param == "tools"
