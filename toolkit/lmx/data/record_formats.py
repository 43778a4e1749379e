"""The dataset formats: detection by keys, and parsing of records."""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import UserError, shorten

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "developer": "system"},
    **{"gpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"chatgpt": "assistant", "function": "tool", "observation": "tool"},
}


@dataclass(frozen=True)
class DataRecord:
    """One dataset example: messages, or prompt and completion, or text.

    Attributes:
        where: its location, ``file:line``.
        skill: the kind of task, if the completion is its only correct answer.
        rejected: the worse one of two completions: messages if the example has
            messages, else text.
        label: whether the completion is desirable, in data without pairs.
        tools: JSON schemas of the functions that the assistant may call.
    """

    where: str
    messages: tuple[dict, ...] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    skill: str | None = None
    rejected: tuple[dict, ...] | str | None = None
    label: bool | None = None
    tools: tuple[dict, ...] | None = None

    def as_text(self) -> str:
        """The whole example as plain text."""
        if self.messages is not None:
            return "\n".join(str(m["content"]) for m in self.messages)
        if self.text is not None:
            return self.text
        return f"{self.prompt}\n{self.completion}"

    def with_rejected(self) -> "DataRecord":
        """The example with the rejected completion in place of the chosen one."""
        assert self.rejected is not None
        if self.messages is not None:
            return replace(self, messages=self.rejected, rejected=None)
        return replace(self, completion=self.rejected, rejected=None)


class Unreadable:
    """In place of a row that Python's JSON reader gives up on."""


class BadRecord(ValueError):
    """A record that does not fit its format; it is skipped, counted and logged."""

    def __init__(self, reason: str):
        super().__init__(shorten(reason))


def _string(value: object, name: str) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, name) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is {_kind_of(value)}, not text")
    if not is_text(value):
        raise BadRecord(f"{name} has half of a surrogate pair")
    return value


def is_text(value: str) -> bool:
    """Whether a string has only whole characters, which tokenizers and files take."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_text(value: list | dict, name: str) -> None:
    # Parquet files may hold dates.
    if value and not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise BadRecord(f"{name} has half of a surrogate pair")


def _part(part: object, name: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        return _string(part.get("text"), name)
    raise BadRecord(f"{name} has a part that is not text")


def _kind_of(value: object) -> str:
    names = {type(None): "empty", dict: "an object", list: "a list", bool: "a boolean"}
    return names.get(type(value), type(value).__name__)


def _filled(value: object, name: str) -> str:
    text = _string(value, name)
    if not text.strip():
        raise BadRecord(f"{name} is empty")
    return text


def _turn(message: object, number: int) -> dict:
    """One message with lmx's names of keys and roles, and its other keys."""
    if not isinstance(message, dict):
        raise BadRecord(f"message {number} is {_kind_of(message)}, not an object")
    extra = {key: value for key, value in message.items() if value is not None}
    role = extra.pop("role", extra.pop("from", None))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRecord(f"message {number} has the role {role!r}")
    content = extra.pop("content", extra.pop("value", None))
    if content is None and not extra.get("tool_calls"):
        raise BadRecord(f"message {number} has no content")
    if (weight := extra.get("weight", 1)) not in (0, 1):
        raise BadRecord(f"message {number} has the weight {weight!r}, not 0 or 1")
    if isinstance(calls := extra.get("tool_calls"), list):
        extra["tool_calls"] = [*map(_with_arguments, calls)]
    _require_text(extra, f"message {number}")
    content = "" if content is None else _string(content, f"message {number}")
    return {"role": ROLES[role], "content": content, **extra}


def _with_arguments(call: object) -> object:
    """A tool call whose arguments are an object.

    Files for OpenAI have its JSON text. Chat templates expect the object, and mlx-lm's
    server gives it to them.
    """
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(parsed, dict):
        return call
    return call | {"function": function | {"arguments": parsed}}


def _turns(value: object, role: str) -> list[dict]:
    """A list of messages, or text as one message of `role`."""
    if not isinstance(value, list):
        return [{"role": role, "content": _filled(value, role)}]
    return [_turn(message, number) for number, message in enumerate(value, 1)]


def is_completion(message: dict) -> bool:
    """Whether a message is a turn of the assistant that is trained: it is not empty,
    and has not the weight 0 of files for OpenAI."""
    filled = message["content"].strip() or message.get("tool_calls")
    is_trained = message.get("weight", 1) != 0
    return message["role"] == "assistant" and is_trained and bool(filled)


def _conversation(turns: list[dict]) -> dict:
    if not any(map(is_completion, turns)):
        raise BadRecord("no assistant turn with content")
    return {"messages": tuple(turns)}


def _chat(record: dict) -> dict:
    messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list):
        raise BadRecord(f"messages is {_kind_of(messages)}, not a list")
    return _conversation(_turns(messages, "user"))


def _prompt_and_completion(prompt: object, completion: object, name: str) -> dict:
    """Prompt and completion, each text or messages."""
    if isinstance(prompt, list) or isinstance(completion, list):
        turns = _turns(prompt, "user") if prompt else []
        return _conversation(turns + _turns(completion, "assistant"))
    return {
        "prompt": _string(prompt, "prompt"),
        "completion": _filled(completion, name),
    }


def _preference(record: dict) -> dict:
    chosen = _preferred(record, "chosen")
    if not record.get("rejected"):
        # The chosen completion alone can be fine-tuned on.
        return chosen
    rejected = _preferred(record, "rejected")
    if chosen.keys() != rejected.keys():
        raise BadRecord("chosen and rejected are not both text or both messages")
    name = "messages" if "messages" in chosen else "completion"
    if chosen[name] == rejected[name]:
        raise BadRecord("chosen and rejected are equal")
    return chosen | {"rejected": rejected[name]}


def _preferred(record: dict, name: str) -> dict:
    """The prompt with the completion `name`."""
    prompt, completion = record.get("prompt"), record[name]
    if isinstance(completion, list):
        turns = _turns(completion, "assistant")
        # Many datasets repeat the prompt at the start of both conversations.
        if turns and turns[0]["role"] != "assistant":
            return _conversation(turns)
    elif prompt is None:
        raise BadRecord(f"{name} is text, but there is no prompt")
    return _prompt_and_completion(prompt, completion, name)


def _unpaired_preference(record: dict) -> dict:
    label = record["label"]
    if label not in (True, False):
        raise BadRecord(f"label is {_kind_of(label)}, not true or false")
    return _completion(record) | {"label": bool(label)}


def _completion(record: dict) -> dict:
    return _prompt_and_completion(record["prompt"], record["completion"], "completion")


def _instruction(record: dict) -> dict:
    parts = [_filled(record["instruction"], "instruction")]
    if record.get("input"):
        parts.append(_string(record["input"], "input"))
    user = {"role": "user", "content": "\n\n".join(parts)}
    return _conversation(
        [user, *_turns(_filled(record["output"], "output"), "assistant")]
    )


def _text(record: dict) -> dict:
    return {"text": _filled(record["text"], "text")}


def add_system(fields: dict, record: dict) -> None:
    """Make messages of the fields of an example if its record has a text `system`: that
    is their first message, unless they have one."""
    system = record.get("system")
    if system is None or not (content := _string(system, "system")).strip():
        return
    if "prompt" in fields:
        prompt = fields.pop("prompt")
        turns = _turns(prompt, "user") if prompt.strip() else []
        fields["messages"] = *turns, *_turns(fields.pop("completion"), "assistant")
        if "rejected" in fields:
            fields["rejected"] = *turns, *_turns(fields["rejected"], "assistant")
    for name in {"messages", "rejected"} & fields.keys():
        if fields[name][0]["role"] != "system":
            fields[name] = {"role": "system", "content": content}, *fields[name]


def tools_of(record: dict) -> tuple[dict, ...] | None:
    """The tools of a record, which may be a list or its JSON text; None without any.

    Raises:
        BadRecord: they are neither.
    """
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise BadRecord("tools is text that is not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise BadRecord("tools is not a list of objects")
    _require_text(tools, "tools")
    return tuple(tools)


@dataclass(frozen=True)
class Format:
    """A dataset format: the keys that identify it, and its parser."""

    keys: tuple[str, ...]
    parse: Callable[[dict], dict]
    optional: tuple[str, ...] = ()


# In order: a record with the keys of several formats has the first one.
FORMATS = {
    "chat": Format(("messages",), _chat, ("conversations",)),
    "preference": Format(("chosen",), _preference, ("prompt", "rejected")),
    "unpaired_preference": Format(
        ("prompt", "completion", "label"), _unpaired_preference
    ),
    "completion": Format(("prompt", "completion"), _completion),
    "instruction": Format(("instruction", "output"), _instruction, ("input",)),
    "text": Format(("text",), _text),
}
# Keys that examples of several formats may have.
COMMON = ("skill", "system", "tools")
COLUMNS = {k for f in FORMATS.values() for k in (*f.keys, *f.optional)} | {*COMMON}

SYNONYMS = {
    "messages": "dialog dialogue conversation turns chat history",
    "prompt": "question query problem input request user q context source",
    "completion": "answer response output solution target reply assistant a",
    "text": "content document body code article passage sentence",
}


def format_of(record: object) -> str | None:
    """The format of a record, detected from its keys."""
    if not isinstance(record, dict):
        return None
    if "conversations" in record:
        return "chat"
    return next((n for n, f in FORMATS.items() if record.keys() >= set(f.keys)), None)


def apply_columns(record: object, columns: dict[str, str]) -> object:
    """`record` with lmx's names for the columns in `columns` (lmx's name -> column)."""
    if not columns or not isinstance(record, dict):
        return record
    renamed = {name: record[key] for name, key in columns.items() if key in record}
    # The named columns decide the format, whatever other keys the record has.
    if format_of(renamed):
        return {key: record[key] for key in COMMON if key in record} | renamed
    return {**record, **renamed}


def check_columns(columns: dict[str, str]) -> None:
    """Refuse column names that no format has.

    Raises:
        UserError: with the nearest name.
    """
    for name in columns:
        if name not in COLUMNS:
            matches = difflib.get_close_matches(name, COLUMNS, n=1)
            raise UserError(
                f"no dataset format has a column {name!r}",
                place="data.columns",
                hint=f"did you mean {matches[0]!r}?"
                if matches
                else f"columns are {', '.join(sorted(COLUMNS))}",
            )


def nearest(keys: list[str]) -> tuple[str, dict[str, str]]:
    """The format closest to a record's keys, and the column for each of its keys."""
    best, renaming, score = "completion", {}, -1.0
    for name in ("completion", "chat", "text"):
        columns = {key: _similar(key, keys) for key in FORMATS[name].keys}
        share = sum(value is not None for value in columns.values()) / len(columns)
        if share > score:
            best, renaming, score = name, columns, share
    return best, {key: value or "<your column>" for key, value in renaming.items()}


def _similar(name: str, keys: list[str]) -> str | None:
    words = [name, *SYNONYMS[name].split()]
    exact = [key for word in words for key in keys if key.lower() == word]
    return next(
        iter(exact + difflib.get_close_matches(name, keys, n=1, cutoff=0.75)), None
    )
