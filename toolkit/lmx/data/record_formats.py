"""The row formats: which keys name one, and how a record becomes a row."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UserError

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"human": "user", "developer": "system"},
    **{"gpt": "assistant", "model": "assistant", "bot": "assistant"},
    **{"chatgpt": "assistant", "function": "tool", "observation": "tool"},
}


@dataclass(frozen=True)
class DataRecord:
    """One row: messages, or prompt and completion, or text.

    Attributes:
        where: its place, ``file:line``.
        skill: the kind of question, where the answer is the one right one.
    """

    where: str
    messages: tuple[dict, ...] | None = None
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    skill: str | None = None

    def as_text(self) -> str:
        """All that is said in the row, for what reads text alone."""
        if self.messages is not None:
            return "\n".join(str(m["content"]) for m in self.messages)
        if self.text is not None:
            return self.text
        return f"{self.prompt}\n{self.completion}"


class BadRecord(ValueError):
    """A row of the wrong shape: skipped, counted and named."""


def _string(value: object, name: str) -> str:
    if isinstance(value, list):
        value = "".join(_part(part, name) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise BadRecord(f"{name} is {_kind_of(value)}, not text")
    return value


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
    """One message with our names of keys and roles; its other keys are kept."""
    if not isinstance(message, dict):
        raise BadRecord(f"message {number} is {_kind_of(message)}, not an object")
    rest = {key: value for key, value in message.items() if value is not None}
    role = rest.pop("role", rest.pop("from", None))
    if role not in ROLES:
        raise BadRecord(f"message {number} has the role {role!r}")
    content = rest.pop("content", rest.pop("value", None))
    if content is None and not rest.get("tool_calls"):
        raise BadRecord(f"message {number} has no content")
    content = "" if content is None else _string(content, f"message {number}")
    return {"role": ROLES[role], "content": content, **rest}


def _turns(value: object, role: str) -> list[dict]:
    """Messages as they are, or text as the one message of `role`."""
    if not isinstance(value, list):
        return [{"role": role, "content": _filled(value, role)}]
    return [_turn(message, number) for number, message in enumerate(value, 1)]


def _conversation(turns: list[dict]) -> dict:
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not any(turn["content"].strip() or turn.get("tool_calls") for turn in answers):
        raise BadRecord("no assistant turn with content")
    return {"messages": tuple(turns)}


def _chat(record: dict) -> dict:
    messages = record.get("messages", record.get("conversations"))
    if not isinstance(messages, list):
        raise BadRecord(f"messages is {_kind_of(messages)}, not a list")
    return _conversation(_turns(messages, "user"))


def _prompt_and_completion(prompt: object, answer: object, name: str) -> dict:
    """Prompt and answer, each text or messages."""
    if isinstance(prompt, list) or isinstance(answer, list):
        asked = _turns(prompt, "user") if prompt else []
        return _conversation(asked + _turns(answer, "assistant"))
    return {
        "prompt": _string(prompt, "prompt"),
        "completion": _filled(answer, name),
    }


def _preference(record: dict) -> dict:
    prompt, answer = record.get("prompt"), record["chosen"]
    if isinstance(answer, list):
        turns = _turns(answer, "assistant")
        # Many sets repeat the prompt at the head of the chosen conversation.
        if turns and turns[0]["role"] != "assistant":
            return _conversation(turns)
    elif prompt is None:
        raise BadRecord("chosen is text, but there is no prompt")
    return _prompt_and_completion(prompt, answer, "chosen")


def _completion(record: dict) -> dict:
    return _prompt_and_completion(record["prompt"], record["completion"], "completion")


def _instruction(record: dict) -> dict:
    asked = [_filled(record["instruction"], "instruction")]
    if record.get("input"):
        asked.append(_string(record["input"], "input"))
    user = {"role": "user", "content": "\n\n".join(asked)}
    return _conversation(
        [user, *_turns(_filled(record["output"], "output"), "assistant")]
    )


def _text(record: dict) -> dict:
    return {"text": _filled(record["text"], "text")}


@dataclass(frozen=True)
class Format:
    """One row format: the keys that tell it and its parser."""

    keys: tuple[str, ...]
    parse: Callable[[dict], dict]
    optional: tuple[str, ...] = ()


# In order: a record with the keys of several is of the first.
FORMATS = {
    "chat": Format(("messages",), _chat, ("conversations",)),
    "preference": Format(("chosen",), _preference, ("prompt", "rejected")),
    "completion": Format(("prompt", "completion"), _completion),
    "instruction": Format(("instruction", "output"), _instruction, ("input",)),
    "text": Format(("text",), _text),
}
COLUMNS = {key for f in FORMATS.values() for key in (*f.keys, *f.optional)} | {"skill"}

SYNONYMS = {
    "messages": "dialog dialogue conversation turns chat history",
    "prompt": "question query problem input request user q context source",
    "completion": "answer response output solution target reply assistant a",
    "text": "content document body code article passage sentence",
}


def format_of(record: object) -> str | None:
    """The format that the keys of `record` tell."""
    if not isinstance(record, dict):
        return None
    if "conversations" in record:
        return "chat"
    return next((n for n, f in FORMATS.items() if record.keys() >= set(f.keys)), None)


def apply_columns(record: object, columns: dict[str, str]) -> object:
    """`record` with our names for the columns that the user named."""
    if not columns or not isinstance(record, dict):
        return record
    ours = {our: record[their] for our, their in columns.items() if their in record}
    # What was named by hand decides the format, whatever else the record holds.
    if format_of(ours):
        return {**({"skill": record["skill"]} if "skill" in record else {}), **ours}
    return {**record, **ours}


def check_columns(columns: dict[str, str]) -> None:
    """Raises UserError where a column is named that no format has."""
    for name in columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            raise UserError(
                f"columns: there is no column {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else _known(),
            )


def _known() -> str:
    return f"columns are {', '.join(sorted(COLUMNS))}"


def nearest(keys: list[str]) -> tuple[str, dict[str, str]]:
    """The format closest to a record's keys, and the renaming that would give it."""
    best, renaming, score = "completion", {}, -1.0
    for name in ("completion", "chat", "text"):
        guess = {our: _alike(our, keys) for our in FORMATS[name].keys}
        share = sum(their is not None for their in guess.values()) / len(guess)
        if share > score:
            best, renaming, score = name, guess, share
    return best, {our: their or "<your column>" for our, their in renaming.items()}


def _alike(our: str, keys: list[str]) -> str | None:
    wanted = [our, *SYNONYMS[our].split()]
    exact = [key for word in wanted for key in keys if key.lower() == word]
    return next(
        iter(exact + difflib.get_close_matches(our, keys, n=1, cutoff=0.75)), None
    )
