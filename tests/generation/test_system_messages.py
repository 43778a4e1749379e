"""System messages where a template takes them, in training and in serving alike."""

import pytest
from lmx.data.chat.messages import name_tool_results
from lmx.data.chat.rendering import ChatTemplate
from lmx.data.chat.system_messages import merge_system_messages
from lmx.data.chat.turns import Chat
from lmx.errors import UserError
from lmx.generation.prompt import encode_chat
from tiny_generators import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES_LATER = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{% endfor %}" + CHATML
)
OTHERS = "messages[:1] + messages[1:] | rejectattr('role', 'equalto', 'system') | list"
DROPS_LATER = CHATML.replace("in messages", f"in {OTHERS}")
ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first or not "
    "loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles') }}"
    "{% endif %}{% endfor %}" + CHATML
)
REFUSES_ALL = REFUSES_LATER.replace(" and not loop.first", "")


def chat(text: str) -> list[dict]:
    """Messages of words such as `s:Brief`; a slash is a blank line."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    turns = (turn.split(":") for turn in text.split())
    return [{"role": roles[r], "content": c.replace("/", "\n\n")} for r, c in turns]


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        (REFUSES_LATER, "s:A u:1", "s:A u:1"),
        (REFUSES_LATER, "s:A s:B u:1", "s:A/B u:1"),
        (DROPS_LATER, "s:A s:B s:C u:1 a:2 u:3", "s:A/B/C u:1 a:2 u:3"),
        (CHATML, "s:A s:B u:1 s:C u:2", "s:A s:B u:1 s:C u:2"),
        (REFUSES_LATER, "s:A u:1 a:2 s:B s:C u:3", "s:A u:1 a:2 u:B/C/3"),
        (DROPS_LATER, "u:1 s:B u:3", "u:1 u:B/3"),
        # Nothing of the user follows.
        (ALTERNATES, "s:A u:1 s:B", "s:A u:1/B"),
        (ALTERNATES, "s:A u:1 s:B a:2 u:3", "s:A u:1/B a:2 u:3"),
        (REFUSES_LATER, "u:1 a:2 s:B", "u:1 a:2 u:B"),
        (REFUSES_LATER, "u:1 a:2 t:3 s:B a:4", "u:1 a:2 t:3 u:B a:4"),
        # A template without any is left to refuse.
        (REFUSES_ALL, "s:A u:1", "s:A u:1"),
    ],
)
def test_system_messages_are_where_the_template_takes_them(template, given, expected):
    tokenizer = byte_tokenizer(template=template)
    merged = merge_system_messages(
        Chat(ChatTemplate(tokenizer), chat(given), tools=None, options={})
    )
    assert merged == chat(expected)
    if template is not REFUSES_ALL and merged != chat(given):
        with pytest.warns(UserWarning, match="merged"):
            served = encode_chat(tokenizer, chat(given))
        assert served == encode_chat(tokenizer, chat(expected))
        if template is not DROPS_LATER:
            with pytest.raises(UserError, match="rejects"):
                encode_chat(tokenizer, chat(given), system_messages="strict")


def test_results_of_tools_have_the_names_of_their_calls():
    function = {"name": "weather", "arguments": {}}
    call = {"id": "c1", "type": "function", "function": function}
    other = {"id": "c2", "type": "function", "function": function | {"name": "time"}}
    given = [
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "own"},
        {"role": "tool", "content": "6", "tool_call_id": "c3"},
        {"role": "tool", "content": "7"},
    ]
    names = [message.get("name") for message in name_tool_results(given)]
    assert names == [None, "time", "own", None, None]
