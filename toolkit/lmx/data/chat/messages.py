"""Messages of dataset files: roles, content, tool calls and which turns are trained."""

import json
from typing import Any

from ...errors import shorten
from .completeness import REASONING, reasoning_of

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "developer": "system", "function_call": "assistant"},
    **{"gpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"chatgpt": "assistant", "function": "tool", "observation": "tool"},
}
# Keys that hold what is no text.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Flags of axolotl: whether a message is trained.
TRAIN_FLAGS = ("training", "train")
KEYS = {
    *("role", "from", "content", "value", "name", "tool_calls", "tool_call_id"),
    *("function_call", "weight", *TRAIN_FLAGS, *REASONING),
}
"""The keys of messages that lmx knows. Others reach the chat template, too."""


class BadRecord(ValueError):
    """A record that does not fit its format; it is skipped, counted and logged."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


def string(value: object, name: str) -> str:
    """Text, or a list of parts that are text, as text."""
    if isinstance(value, list):
        value = "".join(_part(part, name) for part in value)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is {kind_of(value)}, not text")
    if not is_text(value):
        raise BadRecord(f"{name} has half of a surrogate pair")
    return value


def filled(value: object, name: str) -> str:
    """Text that is not empty."""
    text = string(value, name)
    if not text.strip():
        raise BadRecord(f"{name} is empty")
    return text


def is_text(value: str) -> bool:
    """Whether a string has only whole characters, which tokenizers and files take."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: object) -> str:
    """The kind of a value, for messages."""
    names = {type(None): "empty", dict: "an object", list: "a list", bool: "a boolean"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def require_text(value: list | dict, name: str) -> None:
    """Refuse objects with text that has half of a surrogate pair."""
    # Parquet files may hold dates.
    if value and not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise BadRecord(f"{name} has half of a surrogate pair")


def refuse_media(record: dict, name: str = "") -> None:
    """Refuse a record or a message with images, videos or sound."""
    for key in MEDIA:
        if record.get(key):
            raise BadRecord(f"{name}it has {key}; lmx trains on text")


def json_value(text: str, name: str) -> Any:
    """The value of a column that holds JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRecord(f"{name} is text that is not JSON") from None


def _part(part: object, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return string(part.get("text"), name)
    raise BadRecord(f"{name} has a part that is not text")


def parse_turn(message: object, number: int) -> dict:
    """One message with lmx's names of keys and roles, and its other keys.

    Args:
        number: its place among the messages, from 1, for errors.
    """
    name = f"message {number}"
    if not isinstance(message, dict):
        raise BadRecord(f"{name} is {kind_of(message)}, not an object")
    extra = {key: value for key, value in message.items() if value is not None}
    refuse_media(extra, f"{name}: ")
    role = extra.pop("role", extra.pop("from", None))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"{name} has the role {role!r}")
    content = extra.pop("content", extra.pop("value", None))
    if role == "function_call":
        # ShareGPT with tools has the call as the text of a turn.
        extra["tool_calls"], content = content, None
    _set_weight(extra, name)
    if calls := _tool_calls(extra, name):
        extra["tool_calls"] = calls
    if content is None and not calls and not reasoning_of(extra):
        raise BadRecord(f"{name} has no content")
    require_text(extra, name)
    content = "" if content is None else string(content, name)
    return {"role": ROLES[role], "content": content, **extra}


def _set_weight(message: dict, name: str) -> None:
    """Make the weight 0 of the flags that exclude a message from training."""
    if message.get("training_detail") or message.get("train_detail"):
        raise BadRecord(
            f"{name} has training_detail; lmx trains whole turns (training: false "
            "excludes one)"
        )
    if (weight := message.get("weight", 1)) not in (0, 1):
        raise BadRecord(f"{name} has the weight {weight!r}, not 0 or 1")
    for key in TRAIN_FLAGS:
        if (flag := message.pop(key, True)) not in (True, False):
            raise BadRecord(f"{name} has {key}: {flag!r}, not true or false")
        if not flag:
            message["weight"] = 0


def _tool_calls(message: dict, name: str) -> list[dict]:
    """The calls of a message as chat templates and mlx-lm's server have them.

    Removes the keys `tool_calls` and `function_call`.
    """
    calls = message.pop("tool_calls", None) or []
    if older := message.pop("function_call", None):
        calls = [*(calls if isinstance(calls, list) else [calls]), older]
    if isinstance(calls, str):
        calls = json_value(calls, f"{name}: tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list):
        raise BadRecord(f"{name}: tool_calls is {kind_of(calls)}, not a list")
    return [_tool_call(call, f"{name}: a tool call") for call in calls]


def _tool_call(call: object, name: str) -> dict:
    """A call `{"type": "function", "function": {"name", "arguments"}}`.

    Files for OpenAI have the arguments as JSON text. Templates expect the object, and
    mlx-lm's server gives it to them.
    """
    if not isinstance(call, dict):
        raise BadRecord(f"{name} is {kind_of(call)}, not an object")
    if "function" not in call:
        call = {"type": "function", "function": call}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRecord(f"{name} has no function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return call | {"function": function | {"arguments": parsed}}


def parse_turns(value: object, role: str) -> list[dict]:
    """A list of messages, or text as one message of `role`."""
    if not isinstance(value, list):
        return [{"role": role, "content": filled(value, role)}]
    return [parse_turn(message, number) for number, message in enumerate(value, 1)]


def is_completion(message: dict) -> bool:
    """Whether a message is a turn of the assistant that is trained: it is not empty,
    and has not the weight 0 of files for OpenAI."""
    texts = (message["content"].strip(), message.get("tool_calls"))
    is_filled = any(texts) or reasoning_of(message) is not None
    is_trained = message.get("weight", 1) != 0
    return message["role"] == "assistant" and is_trained and is_filled
