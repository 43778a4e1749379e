"""Every key of a recipe as the schema has it: where it stands, its values, meaning."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ..section import Section
from .messages import fields, sections
from .schema import Recipe

KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
# A mapping whose keys are the user's own.
OWN = "<pattern>"


@dataclass(frozen=True)
class Key:
    """A key: what it takes, what it is when left out, and what it means."""

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Block:
    """A block of keys.

    Attributes:
        address: how an argument names it, as "stages.train.adapter"; "" = the top.
        only: of which choice these keys are, as "method: gptq"; "" = of all.
        keys: none where the meaning names another block that has the same.
    """

    address: str
    meaning: str
    only: str = ""
    keys: tuple[Key, ...] = ()

    @property
    def title(self) -> str:
        """The address, and the choice that the keys belong to."""
        return ", ".join(filter(None, [self.address or "top level", self.only]))


def blocks() -> list[Block]:
    """All blocks of the language, a block's own before those inside it."""
    return list(_walk("", [Recipe], {}))


def _walk(address: str, choices: list[type[Section]], told: dict) -> Iterator[Block]:
    """The blocks at an address, whose keys are those of one of `choices`."""
    name = frozenset(choices)
    if name in told:
        yield Block(address, f"The keys of `{told[name]}`.")
        return
    told[name] = address
    parts = [fields(section) for section in choices]
    common = {
        key: info
        for key, info in parts[0].items()
        if all(_same(info, part.get(key)) for part in parts)
    }
    yield Block(address, _meaning(choices), "", _keys(common))
    inner = dict(common)
    for section, part in zip(choices, parts, strict=True):
        if own := {key: info for key, info in part.items() if key not in common}:
            inner |= own
            tag, word = _tag(own)
            rest = {key: info for key, info in own.items() if key != tag}
            only = f"{tag}: {word}"
            yield Block(address, _line(section.__doc__), only, _keys(rest))
    for key, info in inner.items():
        if found := sections(info.annotation):
            step = f"{key}.{OWN}" if get_origin(info.annotation) is dict else key
            yield from _walk(f"{address}.{step}".lstrip("."), found, told)


def _same(one: FieldInfo, other: FieldInfo | None) -> bool:
    names = ("annotation", "default", "description", "metadata")
    return other is not None and all(
        getattr(one, name) == getattr(other, name) for name in names
    )


def _tag(own: dict[str, FieldInfo]) -> tuple[str, str]:
    """The key that chooses between the blocks of a place, and its value here."""
    words = {key: get_args(info.annotation) for key, info in own.items()}
    return next((key, found[0]) for key, found in words.items() if len(found) == 1)


def _meaning(choices: list[type[Section]]) -> str:
    """What a block is; of several choices, each says it of itself."""
    if len(choices) > 1:
        return "Keys that all choices below have."
    return _line(choices[0].__doc__)


def _keys(found: dict[str, FieldInfo]) -> tuple[Key, ...]:
    return tuple(
        Key(name, _values(info), _default(info), _line(info.description))
        for name, info in found.items()
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is None:
        return "absent"
    if isinstance(info.default, Section):
        return "its defaults"
    return json.dumps(info.default).strip('"')


def _values(info: FieldInfo) -> str:
    """What a key takes, in words; that null is allowed where it is the default, too,
    goes without saying."""
    told = _told(info.annotation, info.metadata)
    return ", or ".join(
        part for part in told if part != "null" or info.default is not None
    )


def _told(annotation: Any, limits: list = ()) -> list[str]:
    """The alternatives of a type, each in words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _told(inside[0], [*_flat(inside[1:]), *limits])
    if origin in (Union, UnionType):
        return list(dict.fromkeys(t for part in inside for t in _told(part, limits)))
    if origin is Literal:
        return [", ".join(json.dumps(word).strip('"') for word in inside)]
    if origin is list:
        return [f"list of {' or '.join(_told(inside[0]))}"]
    if origin is dict:
        return [f"mapping of {_plain(inside[0])} to {' or '.join(_told(inside[1]))}"]
    if annotation is NoneType:
        return ["null"]
    return [_plain(annotation) + _limits(limits)]


def _plain(kind: type) -> str:
    return "block" if issubclass(kind, Section) else KINDS[kind]


def _flat(metadata: tuple) -> Iterator:
    """Limits of a type, also those that a `Field` holds."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _limits(metadata: list) -> str:
    found = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in LIMITS.items()
        if isinstance(getattr(item, name, None), int | float)
    ]
    return f" {', '.join(found)}" if found else ""
