"""Messages as clients send them: what they add, and arguments of the template."""

import pytest
from lmx.serving.errors import ApiError
from lmx.serving.prompts import checked_tools, encode_messages
from lmx.serving.protocol import ChatCompletionParameters
from tiny_generators import byte_tokenizer

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SWITCH = TURNS + "{{ 'off' if enable_thinking is false else 'on' }}"
EFFORT = TURNS + "{{ reasoning_effort }}"
NAMED = (
    "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}\n{% endfor %}"
)
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('no') }}{% endif %}{% endfor %}" + TURNS
)
USER = {"role": "user", "content": "Hi"}


def prompt(template, *messages, system_messages="merge", **parameters):
    """The text of the prompt of a request."""
    tokenizer = byte_tokenizer(template=template)
    request = ChatCompletionParameters.parse({"messages": [*messages], **parameters})
    encoded = encode_messages(
        tokenizer,
        request,
        checked_tools(request),
        system_messages=system_messages,
    )
    return tokenizer.decode(encoded.tokens)


@pytest.mark.parametrize(
    ("template", "effort", "end"),
    [
        (SWITCH, "none", "off"),
        (SWITCH, "low", "on"),
        (EFFORT, "high", "high"),
        (EFFORT, "none", "none"),
        (TURNS, "low", "Hi\n"),
    ],
)
def test_the_effort_of_reasoning_is_the_template_s_own(template, effort, end):
    assert prompt(template, USER, reasoning_effort=effort).endswith(end)
    given = {"chat_template_kwargs": {"enable_thinking": False}}
    if template is SWITCH:
        assert prompt(template, USER, reasoning_effort="low", **given).endswith("off")


def test_what_clients_add_to_messages_is_left_out():
    notes = {
        "refusal": None,
        "annotations": [],
        "cache_control": {"type": "ephemeral"},
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    }
    answer = {"role": "assistant", "content": "Ho"}
    assert prompt(TURNS, USER, answer | notes) == prompt(TURNS, USER, answer)
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    assert prompt(TURNS, USER | {"content": [part]}) == prompt(TURNS, USER)
    with pytest.raises(ApiError, match="Unrecognized"):
        prompt(TURNS, USER | {"mood": "good"})


def test_a_result_has_the_name_of_its_call():
    function = {"name": "weather", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "4"}
    assert "tool weather: 4" in prompt(NAMED, USER, calls, result)


def test_system_messages_are_merged_or_refused():
    first, later = ({"role": "system", "content": text} for text in "AB")
    with pytest.warns(UserWarning, match="merged"):
        text = prompt(ONE_SYSTEM, first, later, USER)
    assert text == "system: A\n\nB\nuser: Hi\n"
    with pytest.raises(ApiError, match="rejects"):
        prompt(ONE_SYSTEM, first, later, USER, system_messages="strict")
