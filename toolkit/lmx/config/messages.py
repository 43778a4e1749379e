"""Messages for pydantic errors, with hints, and navigation in the schema."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from .base import ConfigModel
from .errors import KeyPath
from .key_hints import key_hint, value_hint
from .schema import RecipeConfig, StageEntry
from .validation import EXPECTED, describe, path_of, shown

# Keys whose value chooses among several blocks.
TAGS = ("method", "type")


@dataclass(frozen=True)
class Problem:
    """A problem at a path of the recipe, with its key, its value or its block."""

    path: KeyPath
    message: str
    hint: str | None = None
    of: str = "value"


def explain(error: dict, data: Any) -> Problem:
    """The problem behind one pydantic error about `data`."""
    kind, context = error["type"], error.get("ctx", {})
    path = path_of(error["loc"], data)
    if kind == "extra_forbidden":
        return _unknown_key(path, data)
    if kind == "missing":
        key = error["loc"][-1]
        info = fields(section_at(path, data))[key]
        return Problem(path, f"missing key '{key}'", info.description, of="block")
    if kind == "value_error":
        return Problem(path, str(context["error"]), of="block")
    if kind == "union_tag_not_found":
        return Problem(path, f"missing key {context['discriminator']}", of="block")
    if kind in ("literal_error", "union_tag_invalid"):
        return _unknown_value(path, error, data)
    hint = _type_hint(path, error) if kind in EXPECTED else None
    return Problem(path, describe(error), hint)


def nearest(name: Any, names: Iterable[str]) -> str | None:
    """The nearest name as a hint, else all names."""
    names = list(names)
    close = difflib.get_close_matches(str(name), names, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"available: {', '.join(names)}" if names else None


def fields(section: type[ConfigModel]) -> dict[str, FieldInfo]:
    """The fields of a section by recipe key."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def sections(annotation: Any) -> list[type[ConfigModel]]:
    """The sections in the type of a field."""
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in sections(part)]


def section_at(path: KeyPath, data: Any) -> type[ConfigModel] | None:
    """The section of the block at `path` of `data`."""
    section: type[ConfigModel] | None = RecipeConfig
    inner: list[type[ConfigModel]] = []
    choices: list[type[ConfigModel]] = []
    for step in path:
        data = data[step]
        if isinstance(step, int):
            section = _choice(choices, data) if choices else section
            continue
        if inner:
            # The user chose this key; its value has one of the inner sections.
            section, inner = _choice(inner, data), []
            continue
        info = fields(section).get(step) if section else None
        choices = sections(info.annotation) if info else []
        if info and get_origin(info.annotation) is dict:
            section, inner = None, choices
        else:
            section = _choice(choices, data) if choices else None
    return section


def _choice(choices: list[type[ConfigModel]], block: Any) -> type[ConfigModel]:
    """The section that the key `method` or `type` of a block selects."""
    for key in TAGS:
        value = block.get(key) if isinstance(block, dict) else None
        for section in choices:
            field = section.model_fields.get(key)
            if value and field and get_args(field.annotation) == (value,):
                return section
    return choices[0]


def _unknown_key(path: KeyPath, data: Any) -> Problem:
    section = section_at(path[:-1], data)
    names = fields(section)
    word = "stage kind" if section is StageEntry else "key"
    key = str(path[-1])
    hint = key_hint(key, set(names)) or _home_hint(key, names) or nearest(key, names)
    return Problem(path, f"unknown {word} '{key}'", hint, of="key")


def _home_hint(key: str, names: Iterable[str]) -> str | None:
    """The block that has `key`, unless this block has a key of nearly that name."""
    if difflib.get_close_matches(key, names, n=1):
        return None
    if not (homes := _homes().get(key)):
        return None
    # lmx itself writes the block `python`.
    home = min(homes, key=lambda name: (name.startswith("python."), name.count(".")))
    return f"'{key}' belongs to {home.rpartition('.')[0] or 'the top level'}"


@cache
def _homes() -> dict[str, list[str]]:
    """The addresses of every key of the schema by its name."""
    homes: dict[str, list[str]] = {}
    for address, _ in keys(RecipeConfig):
        homes.setdefault(address.rpartition(".")[2], []).append(address)
    return homes


def keys(
    section: type[ConfigModel], above: str = ""
) -> Iterable[tuple[str, FieldInfo]]:
    """Dotted addresses of all keys of a section and the sections below it."""
    for key, info in fields(section).items():
        yield f"{above}{key}", info
        for inner in sections(info.annotation):
            yield from keys(inner, f"{above}{key}.")


def _unknown_value(path: KeyPath, error: dict, data: Any) -> Problem:
    value, context = error["input"], error["ctx"]
    if error["type"] == "union_tag_invalid":
        # A recipe may have the value alone in place of the block.
        path = path_of((*path, context["discriminator"].strip("'")), data)
        value = context["tag"]
    expected = context.get("expected") or context["expected_tags"]
    names = [name.strip("'") for name in re.split(", | or ", expected)]
    hint = value_hint(path, value, names) or nearest(value, names)
    if path[-1] == "method":
        return Problem(path, f"unknown method {shown(value)}", hint)
    choices = "one of " * (len(names) > 1) + ", ".join(names)
    message = f"expected {choices}; got {shown(value)}"
    return Problem(path, message, None if hint.startswith("available") else hint)


def _type_hint(path: KeyPath, error: dict) -> str | None:
    value = error["input"]
    if path[:-1] == ("stages",) and isinstance(value, str):
        return f"write '- {value}:'" if value in fields(StageEntry) else None
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        return "use quotes to make it text"
    return None
