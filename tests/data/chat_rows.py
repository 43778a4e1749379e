"""Chats as rows of a user's file, for the table of chat templates."""

import json


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str | None, **keys) -> dict:
    return {"role": "assistant", "content": content} | keys


def call(number: int, name: str, arguments: dict | str) -> dict:
    """A call as programs for OpenAI write it. Mistral needs ids of nine characters."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"callid{number:03}", "type": "function", "function": function}


def result(number: int, name: str, content: str) -> dict:
    key = f"callid{number:03}"
    return {"role": "tool", "tool_call_id": key, "name": name, "content": content}


def _tool(name: str, **properties: str) -> dict:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    function = {"name": name, "description": "A tool.", "parameters": parameters}
    return {"type": "function", "function": function}


SYSTEM = {"role": "system", "content": "Answer as a sailor would."}
HELLO = user("Hello there, who are you?")
AHOY = assistant("Ahoy, I am the cook.")
TOOLS = [
    _tool("get_weather", city="string", days="integer", metric="boolean"),
    _tool("find_pages", query="string", limits="object"),
]
WEATHER = call(1, "get_weather", {"city": "Zürich", "days": 3, "metric": True})
PAGES_ARGUMENTS = {
    "query": 'fresh "powder"',
    "limits": {"most": 7.5, "tags": ["alps", "ski"]},
}
PAGES = call(2, "find_pages", PAGES_ARGUMENTS)
PAGES_AS_TEXT = call(2, "find_pages", json.dumps(PAGES_ARGUMENTS))
COLD = result(1, "get_weather", '{"degrees": -4}')
FOUND = result(2, "find_pages", "Three pages about skiing.")
ASK_WEATHER = user("What is the weather in Zurich?")
REASON = "The user greets me. I play a cook on a ship."
ASKED_AND_TOLD = [
    *(ASK_WEATHER, assistant("", tool_calls=[WEATHER]), COLD),
    assistant("It is four below zero."),
]
REASONS = ("Count to one first.", "Then add one\n\nmore to it.", "Now three are left.")


def _chat(*messages: dict) -> dict:
    return {"messages": list(messages)}


def _with_tools(*messages: dict) -> dict:
    return _chat(*messages) | {"tools": TOOLS}


def _many(*contents: str) -> list[dict]:
    return [(user, assistant)[n % 2](text) for n, text in enumerate(contents)]


def _inline(reason: str, content: str) -> dict:
    return assistant(f"<think>\n{reason}\n</think>\n\n{content}")


def _reasoned(reason: str, content: str) -> dict:
    return assistant(content, reasoning_content=reason)


def _counting(answer) -> list[dict]:
    """Three questions, with an answer of each reason."""
    pairs = zip(
        ("One?", "Two?", "Three?"), ("Uno.", "Due.", "Tre."), REASONS, strict=True
    )
    return [m for q, a, reason in pairs for m in (user(q), answer(reason, a))]


CHATS = {
    "one_turn": _chat(HELLO, AHOY),
    "many_turns": _chat(
        *_many("Name a fish.", "Cod.", "Another one?", "Herring."),
        *_many("And a bird?", "An albatross.\n\nOr a gull.", "Thanks!", "Aye aye."),
    ),
    "system": _chat(SYSTEM, HELLO, AHOY),
    "system_many_turns": _chat(
        SYSTEM, *_many("Name a fish.", "Cod.", "Why?", "It is tasty.")
    ),
    "call": _with_tools(ASK_WEATHER, assistant(None, tool_calls=[WEATHER])),
    "call_with_content": _with_tools(
        ASK_WEATHER, assistant("I look it up at once.", tool_calls=[WEATHER])
    ),
    "two_calls": _with_tools(
        ASK_WEATHER, assistant("", tool_calls=[WEATHER, PAGES_AS_TEXT])
    ),
    "tool_result": _with_tools(*ASKED_AND_TOLD),
    "tools_many_turns": _with_tools(
        *(SYSTEM, *ASKED_AND_TOLD, user("Find me some slopes.")),
        *(assistant("", tool_calls=[PAGES]), FOUND),
        assistant("There are three pages."),
    ),
    "reasoning": _chat(HELLO, AHOY | {"reasoning_content": REASON}),
    "reasoning_many_turns": _chat(*_counting(_reasoned)),
    "reasoning_and_calls": _with_tools(
        *(ASK_WEATHER, _reasoned(REASONS[0], "") | {"tool_calls": [WEATHER]}, COLD),
        *(_reasoned(REASONS[1], "Four below."), user("And the slopes?")),
        _reasoned(REASONS[2], "Open."),
    ),
    "inline_reasoning": _chat(HELLO, _inline(REASON, "Ahoy, I am the cook.")),
    "inline_reasoning_many_turns": _chat(SYSTEM, *_counting(_inline)),
    "some_reasoning": _chat(*_counting(_reasoned)[:3], assistant("Due.")),
    "adjacent_assistants": _chat(
        HELLO, AHOY, assistant("And you, sir?"), user("A guest."), AHOY
    ),
    "adjacent_users": _chat(HELLO, user("Anybody at home?"), AHOY, user("Good."), AHOY),
    "empty_turn": _chat(HELLO, assistant(""), user("Are you still there?"), AHOY),
    "unicode": _chat(
        *_many(
            "Cafe\u0301 \u2028 שלום 👩‍👩‍👧 東京?",
            "Ja: e\u0301\u0327, 🙂🏽 \u2029 مرحبا \u200f… ﬁ",
            "と\u3099",
            "\ufeffどうも \u0085 𝒳",
        )
    ),
    "code": _chat(
        *_many(
            "{{ x }} {% for i in y %}\n  {name: 1} {% endfor %}\n",
            "    print({{ '{{' }})\n\treturn {\"a\": {}} {# no #} {% raw %}\n\n  ",
            "  and }} now %}?\n\n",
            "\n\n```jinja\n{{ messages[0].content }}\n```\n",
        )
    ),
    "repeats": _chat(
        *_many("Echo: ping", "Echo: ping", "ping", "ping", "ping", "Echo: ping")
    ),
    "assistant_first": _chat(
        AHOY, user("Good morning, cook."), assistant("Morning, sir.")
    ),
    "later_system": _chat(
        *(SYSTEM, HELLO, AHOY),
        *({"role": "system", "content": "Now be brief."}, user("Who am I?"), AHOY),
    ),
    "leading_space": _chat(
        *_many("Any extras?", "\nTwo extras noted.", "And now?", "  \n Three."),
        *_many("Sure?", "Yes.", "And why?", " \tWell."),
    ),
    "untrained_greeting": _chat(
        AHOY | {"weight": 0}, HELLO, assistant("Morning, sir.")
    ),
    "ends_with_user": _chat(HELLO, AHOY, user("Are you still there?")),
}
# More turns than lmx looks at one by one. The content of some occurs in others.
LONG = {"messages": _many(*(f"Number {n * n % 64} of {n % 7}?" for n in range(40)))}
