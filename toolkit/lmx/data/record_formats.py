"""The dataset formats: detection by keys, and parsing of records."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import UserError
from .chat.messages import (
    EMPTY,
    FLAGS,
    BadRecord,
    filled,
    is_completion,
    json_value,
    kind_of,
    parse_turns,
    refuse_content,
    rename_keys,
    require_text,
    string,
)
from .chat.messages import KEYS as MESSAGE_KEYS

# Columns of ShareGPT, older files for OpenAI and LLaMA-Factory, and lmx's names.
ALIASES = {"conversations": "messages", "functions": "tools"}
ALIASES |= {"kto_tag": "label", "desirable": "label"}
# The schema of a function's arguments, as Anthropic and MCP name it.
SCHEMA_ALIASES = {"input_schema": "parameters", "inputSchema": "parameters"}
# Booleans, numbers and words as text.
TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Of a text whose tokenizer is unknown, few rather than many.
CHARACTERS_PER_TOKEN = 3
# Arguments of a chat template that come from lmx or from other columns.
RESERVED = {
    *("messages", "conversation", "tools", "chat_template", "tokenize", "padding"),
    *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    "tokenizer_kwargs",
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
        prompt_messages: number of messages at the start that are not trained.
        chat_template_kwargs: further arguments of the chat template.
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
    prompt_messages: int = 0
    chat_template_kwargs: dict | None = None

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


@dataclass(frozen=True)
class Unreadable:
    """In place of a row that cannot be read, for a reason."""

    reason: str


UNREADABLE = Unreadable("more digits or levels than can be read")


class BadSource(BadRecord):
    """A record that shows that its whole source would be misread."""


def _truth(value: object) -> bool | None:
    """Whether a value means true or false; None = neither."""
    return TRUTH.get(str(value).lower())


def _conversation(turns: list[dict], prompt_messages: int = 0) -> dict:
    if not any(map(is_completion, turns[prompt_messages:])):
        raise BadRecord("no assistant turn with content")
    return {"messages": tuple(turns), "prompt_messages": prompt_messages}


def _chat(record: dict) -> dict:
    if not isinstance(messages := record.get("messages"), list):
        raise BadRecord(f"messages is {kind_of(messages)}, not a list")
    return _conversation(parse_turns(messages, "user"))


def _prompt_and_completion(prompt: object, completion: object, name: str) -> dict:
    """Prompt and completion, each text or messages."""
    if isinstance(prompt, list) or isinstance(completion, list):
        turns = parse_turns(prompt, "user") if prompt else []
        return _conversation(turns + parse_turns(completion, "assistant"), len(turns))
    return {
        "prompt": string(prompt, "prompt"),
        "completion": filled(completion, name),
    }


def _preference(record: dict) -> dict:
    chosen = _preferred(record, "chosen")
    if not record.get("rejected"):
        # The chosen completion alone can be fine-tuned on.
        return chosen
    rejected = _preferred(record, "rejected")
    if ("messages" in chosen) != ("messages" in rejected):
        raise BadRecord("chosen and rejected are not both text or both messages")
    name = "messages" if "messages" in chosen else "completion"
    if chosen[name] == rejected[name]:
        raise BadRecord("chosen and rejected are equal")
    if name == "messages":
        # What both conversations begin with is their prompt.
        pairs = zip(chosen[name], rejected[name], strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if shared is None:
            raise BadRecord("one of chosen and rejected is the start of the other")
        roles = {part[name][shared]["role"] for part in (chosen, rejected)}
        if roles != {"assistant"}:
            raise BadRecord("chosen and rejected have different prompts")
        chosen["prompt_messages"] = shared
    return chosen | {"rejected": rejected[name]}


def _preferred(record: dict, name: str) -> dict:
    """The prompt with the completion `name`."""
    prompt, completion = record.get("prompt"), record[name]
    if isinstance(completion, list):
        turns = parse_turns(completion, "assistant")
        if turns and turns[0]["role"] != "assistant":
            # A conversation with a prompt of its own, which many datasets repeat.
            before = parse_turns(prompt, "user") if prompt else []
            known, texts = (
                [(m["role"], m["content"].strip()) for m in part]
                for part in (before, turns)
            )
            for end in range(len(known), len(turns)):
                if texts[end - len(known) : end] == known:
                    return _conversation(turns, end)
            if known[-1][0] == "user":
                raise BadRecord(
                    f"{name} begins with another prompt than the column prompt"
                )
            return _conversation(before + turns, len(before))
    elif prompt is None:
        raise BadRecord(f"{name} is text, but there is no prompt")
    return _prompt_and_completion(prompt, completion, name)


def _unpaired_preference(record: dict) -> dict:
    label = record["label"]
    # A gap of pandas is no number.
    if label is None or label != label:
        raise BadRecord("it has no label")
    if (is_good := _truth(label)) is None:
        # To skip it could leave good completions alone.
        raise BadSource(
            f"the label {label!r} is not true, false, 1 or 0: write false for a bad "
            "completion, and leave out those that nobody judged"
        )
    return _completion(record) | {"label": is_good}


def _completion(record: dict) -> dict:
    return _prompt_and_completion(record["prompt"], record["completion"], "completion")


def _instruction(record: dict) -> dict:
    parts = [filled(record["instruction"], "instruction")]
    if record.get("input"):
        parts.append(string(record["input"], "input"))
    prompt, history = [], record.get("history") or []
    if not isinstance(history, list):
        raise BadRecord(f"history is {kind_of(history)}, not a list")
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRecord("history is not a list of pairs")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            prompt.append({"role": role, "content": string(text, "history")})
    prompt.append({"role": "user", "content": "\n\n".join(parts)})
    return _prompt_and_completion(prompt, filled(record["output"], "output"), "output")


def parse_record(record: dict, name: str) -> dict:
    """The fields of a `DataRecord` of the format `name`.

    Raises:
        BadRecord: the record does not fit the format, or has what lmx does not train.
    """
    refuse_content(record, "it")
    for flag in sorted(FLAGS & record.keys()):
        if _truth(value := record[flag]) is False or isinstance(value, list):
            raise BadRecord(f"it has {flag}: {str(value).lower()}")
        if flag == "weight" and value not in (None, 1):
            raise BadRecord(f"it has the weight {value!r}; lmx has no weights")
    label, labelled = record.get("label"), ("chat", "instruction")
    # Other labels are classes, which say nothing about an answer.
    if name in labelled and (_truth(label) is not None or label == -1):
        raise BadRecord("it has a label; data for kto has prompt, completion and label")
    if record.get("history") and name != "instruction":
        raise BadRecord("it has history, which only instruction examples may have")
    fields = FORMATS[name].parse(record)
    if name == "text":
        return fields
    fields["tools"] = _tools(record, fields.get("messages", ()))
    system = record.get("system")
    if system is not None and (content := string(system, "system")).strip():
        # The first message, unless the example has one.
        if "prompt" in fields:
            prompt, completion = fields.pop("prompt"), fields.pop("completion")
            turns = parse_turns(prompt, "user") if prompt.strip() else []
            fields["prompt_messages"] = len(turns)
            fields["messages"] = *turns, *parse_turns(completion, "assistant")
            if "rejected" in fields:
                rejected = parse_turns(fields["rejected"], "assistant")
                fields["rejected"] = *turns, *rejected
        if fields["messages"][0]["role"] != "system":
            fields["prompt_messages"] += fields["prompt_messages"] > 0
            for key in {"messages", "rejected"} & fields.keys():
                fields[key] = {"role": "system", "content": content}, *fields[key]
    key = "chat_template_kwargs"
    options = json_value(record.get(key), key) or None
    if options is not None:
        if not isinstance(options, dict):
            raise BadRecord(f"{key} is {kind_of(options)}, not an object")
        options = {name: value for name, value in options.items() if value is not None}
        if taken := RESERVED & options.keys():
            raise BadRecord(f"{key} has {min(taken)}, which lmx sets")
        require_text(options, key)
    fields[key] = options
    return fields


def _tools(record: dict, messages: Iterable[dict]) -> tuple[dict, ...] | None:
    """The tools of a record or of one of its messages, which may be JSON text; None
    without any.

    Raises:
        BadRecord: they are no list of functions, or in two places.
    """
    given = {"tools": record.get("tools")}
    given |= {
        f"tools of message {n}": m.get("tools") for n, m in enumerate(messages, 1)
    }
    names = [name for name, tools in given.items() if tools not in EMPTY]
    if len(names) > 1:
        raise BadRecord(f"it has {' and '.join(names)}")
    [name] = names or ["tools"]
    tools = json_value(given[name], name)
    if tools and not isinstance(tools, list):
        raise BadRecord(f"{name} is not a list of objects")
    return tuple(_tool(tool, name) for tool in tools or ()) or None


def _tool(tool: object, name: str) -> dict:
    """A tool as servers get it: `{"type": "function", "function": ...}`."""
    if not isinstance(tool, dict):
        raise BadRecord(f"{name} is not a list of objects")
    kind, function = tool.get("type", "function"), tool.get("function")
    if function is None:
        # The function alone, as for Anthropic and in OpenAI's Responses API.
        function = {key: value for key, value in tool.items() if key != "type"}
        tool = {}
    if kind not in ("function", "custom") or not isinstance(function, dict):
        raise BadRecord(f"{name} has a tool of the type {kind!r} that is no function")
    function = rename_keys(function, SCHEMA_ALIASES, name)
    if not isinstance(function.get("name"), str):
        raise BadRecord(f"{name} has a function without a name")
    if not isinstance(schema := function.get("parameters") or {}, dict):
        raise BadRecord(f"{name}: parameters is {kind_of(schema)}, not an object")
    tool = {"type": "function", **tool} | {"type": "function", "function": function}
    require_text(tool, name)
    return tool


def unknown_keys(record: dict, name: str) -> Iterator[str]:
    """The columns of an example of the format `name` and the keys of its messages that
    lmx does not use, if they hold something. Those of messages reach the chat template.
    """
    known = FORMATS[name].columns
    for key, value in record.items():
        is_flag = key in FLAGS and _truth(value)
        if key not in known and value not in EMPTY and not is_flag:
            yield key
        elif key in ("messages", "prompt", "chosen", "rejected", "completion"):
            for message in value if isinstance(value, list) else ():
                for other in message.keys() - MESSAGE_KEYS - {"tools"}:
                    if message[other] not in EMPTY:
                        yield f"{key}.{other}"


# Keys that examples of several formats may have.
COMMON = ("skill", "system", "tools", "chat_template_kwargs")


@dataclass(frozen=True)
class Format:
    """A dataset format: the keys that identify it, its parser, and its other keys."""

    keys: tuple[str, ...]
    parse: Callable[[dict], dict]
    optional: tuple[str, ...] = ()
    common: tuple[str, ...] = COMMON

    @cached_property
    def columns(self) -> set[str]:
        """All keys that are read."""
        return {*self.keys, *self.optional, *self.common}


# In order: a record with the keys of several formats has the first one.
FORMATS = {
    "chat": Format(("messages",), _chat),
    "preference": Format(("chosen",), _preference, ("prompt", "rejected")),
    "unpaired_preference": Format(
        ("prompt", "completion", "label"), _unpaired_preference
    ),
    "completion": Format(("prompt", "completion"), _completion),
    "instruction": Format(
        ("instruction", "output"), _instruction, ("input", "history")
    ),
    "text": Format(
        ("text",),
        lambda record: {"text": filled(record["text"], "text")},
        common=("skill",),
    ),
}
COLUMNS = {k for f in FORMATS.values() for k in (*f.keys, *f.optional)} | {*COMMON}
COLUMNS |= ALIASES.keys()

SYNONYMS = {
    "messages": "dialog dialogue conversation turns chat history",
    "prompt": "question query problem input request user q text context source message "
    "ticket email review comment sentence body",
    "completion": "answer response output solution target reply assistant a label "
    "category class intent topic sentiment rating",
    "text": "content document body code article passage sentence",
}
# Columns that name a record: nobody trains on them unasked.
IDS = {"id", "uuid", "guid", "index", "idx", "url", "date", "time", "timestamp"}


def apply_columns(record: object, columns: dict[str, str]) -> tuple[object, str | None]:
    """`record` with lmx's names for the columns in `columns` (lmx's name -> column)
    and in `ALIASES`, and its format, which has the columns that the user named.

    A record without such a column keeps its own names.
    """
    if not isinstance(record, dict):
        return record, None
    named = {name: record[key] for name, key in columns.items() if key in record}
    taken = {columns[name] for name in named}
    renamed = {
        # A column whose name another one has is not read, and is named in the log.
        f"{key} (beside {columns[key]})" if key in named else key: value
        for key, value in record.items()
        if key not in taken
    }
    try:
        renamed = rename_keys(renamed | named, ALIASES, "it")
    except BadRecord as error:
        return Unreadable(str(error)), None
    keys = {ALIASES.get(name, name) for name in named}.difference(COMMON)
    for name, form in FORMATS.items():
        if renamed.keys() >= {*form.keys} and keys <= form.columns:
            return renamed, name
    return renamed, None


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


def nearest(keys: list[str]) -> tuple[str, dict[str, str | None]]:
    """The format closest to a record's keys, and the column for each of its keys.

    Of two unknown columns, the first one is the prompt and the other one the
    completion, unless it is one of `IDS`; beside a text, the other one may be anything.
    """
    best, renaming, score = "completion", dict[str, str | None](), -1.0
    for name in ("completion", "chat", "text"):
        columns = {}
        for key in FORMATS[name].keys:
            words = [key, *SYNONYMS[key].split()]
            similar = [own for word in words for own in keys if own.lower() == word]
            similar += difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
            free = (own for own in similar if own not in columns.values())
            columns[key] = next(free, None)
        share = sum(value is not None for value in columns.values()) / len(columns)
        unclear = {key.lower() for key in keys} & {"text", *IDS}
        if name == "completion" and len(keys) == 2 and not unclear:
            free_keys = [own for own in keys if own not in columns.values()]
            # One that is known leaves no doubt about the other.
            share = share and 1.0
            columns = {k: v or free_keys.pop(0) for k, v in columns.items()}
        if share > score:
            best, renaming, score = name, columns, share
    return best, renaming
