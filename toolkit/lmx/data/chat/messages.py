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
# Whether a message is trained: 0 or false excludes it, in files for OpenAI, axolotl,
# ms-swift and others.
FLAGS = {"weight", "training", "train", "trainable", "loss", "loss_mask"}
# Keys that are no text, and others whose content lmx does not train, with the reason.
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
DETAILS = "lmx trains whole turns (training: false excludes one)"
REFUSED = dict.fromkeys(MEDIA, "lmx trains on text") | {
    **{"training_detail": DETAILS, "train_detail": DETAILS},
    "refusal": "the text of an answer is content",
}
# Keys of ShareGPT and of older files for OpenAI, and lmx's names of them.
ALIASES = {"from": "role", "value": "content", "function_call": "tool_calls"}
KEYS = {
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *(*ALIASES, *FLAGS, *REASONING),
}
"""The keys of messages that lmx knows. Others reach the chat template, too."""
EMPTY = (None, "", [], {})
# Keys of a tool call that are no arguments.
CALL_KEYS = {"name", "arguments", "type", "id", "index", "call_id"}


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
    names |= {int: "a number", float: "a number", str: "text"}
    return names.get(type(value), type(value).__name__)


def require_text(value: list | dict, name: str) -> None:
    """Refuse objects with text that has half of a surrogate pair."""
    # Parquet files may hold dates.
    if value and not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise BadRecord(f"{name} has half of a surrogate pair")


def refuse_content(record: dict, name: str) -> None:
    """Refuse a record or a message with a filled key of `REFUSED`."""
    for key, reason in REFUSED.items():
        if record.get(key):
            raise BadRecord(f"{name} has {key}; {reason}")


def rename_keys(record: dict, aliases: dict[str, str], name: str) -> dict:
    """The record with lmx's names of its keys (other name -> lmx's name).

    Raises:
        BadRecord: it has two names of a key, with different values.
    """
    renamed = {key: value for key, value in record.items() if key not in aliases}
    for key, own in aliases.items():
        value = record.get(key)
        if value is not None and renamed.get(own) in EMPTY:
            renamed[own] = value
        elif value not in EMPTY and value != renamed[own]:
            raise BadRecord(f"{name} has {own} and {key}, which mean the same")
    return renamed


def load_json(text: str) -> Any:
    """The value of JSON text. An object with a key twice is a `BadRecord`."""
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict:
    if len(value := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise BadRecord(f"an object has the key {max(keys, key=keys.count)!r} twice")
    return value


def json_value(value: Any, name: str) -> Any:
    """A value, or the value of JSON text; None if that is blank."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value) if value.strip() else None
    except BadRecord as error:
        raise BadRecord(f"{name}: {error}") from None
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
    refuse_content(message, name)
    extra = rename_keys(message, ALIASES, name)
    extra = {key: value for key, value in extra.items() if value is not None}
    role, content = extra.pop("role", None), extra.pop("content", None)
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"{name} has the role {role!r}")
    if role == "function_call":
        # ShareGPT with tools has the call as the text of a turn.
        extra["tool_calls"], content = content, None
    flags = {key: extra.pop(key) for key in sorted(FLAGS & extra.keys())}
    for key, flag in flags.items():
        if flag not in (0, 1):
            raise BadRecord(f"{name} has {key}: {flag!r}, not 0, 1, true or false")
        if not flag:
            extra["weight"] = 0
    calls = json_value(extra.pop("tool_calls", None), f"{name}: tool_calls")
    calls = [calls] if isinstance(calls, dict) else calls or []
    if not isinstance(calls, list):
        raise BadRecord(f"{name}: tool_calls is {kind_of(calls)}, not a list")
    if calls:
        extra["tool_calls"] = [_tool_call(c, f"{name}: a tool call") for c in calls]
    if content is None and not calls and not reasoning_of(extra):
        raise BadRecord(f"{name} has no content")
    require_text(extra, name)
    content = "" if content is None else string(content, name)
    return {"role": ROLES[role], "content": content, **extra}


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
    arguments = json_value(function.get("arguments"), f"{name}: arguments")
    if arguments is None:
        if others := function.keys() - CALL_KEYS:
            raise BadRecord(f"{name} has {min(others)} and no arguments")
        arguments = {}
    if not isinstance(arguments, dict):
        kind = kind_of(arguments)
        raise BadRecord(f"{name}: arguments is {kind}, not an object")
    return call | {"function": function | {"arguments": arguments}}


def parse_turns(value: object, role: str) -> list[dict]:
    """A list of messages, or text as one message of `role`."""
    if not isinstance(value, list):
        return [{"role": role, "content": filled(value, role)}]
    return [parse_turn(message, number) for number, message in enumerate(value, 1)]


def name_tool_results(messages: list[dict]) -> list[dict]:
    """Messages in which the results of tools have the names of the calls' functions.

    Clients give the id of the call alone, and some templates print the name.
    """
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    names = {str(c["id"]): c["function"]["name"] for c in calls if c.get("id")}
    named = []
    for message in messages:
        key = str(message.get("tool_call_id"))
        if message["role"] == "tool" and not message.get("name") and key in names:
            message = message | {"name": names[key]}
        named.append(message)
    return named


def is_completion(message: dict) -> bool:
    """Whether a message is a turn of the assistant that is trained: it is not empty,
    and has not the weight 0 of files for OpenAI."""
    texts = (message["content"].strip(), message.get("tool_calls"))
    is_filled = any(texts) or reasoning_of(message) is not None
    is_trained = message.get("weight", 1) != 0
    return message["role"] == "assistant" and is_trained and is_filled
