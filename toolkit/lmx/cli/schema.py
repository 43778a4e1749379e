"""Every key of a recipe as the schema has it: where it stands, its values, meaning."""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ..config.base import ConfigModel
from ..config.messages import fields, nearest, sections
from ..config.schema import Recipe
from ..errors import UserError

KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
# A mapping whose keys are the user's own.
OWN = "<pattern>"


@dataclass(frozen=True)
class KeyReference:
    """A key: what it takes, what it is when left out, and what it means."""

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class BlockReference:
    """A block of keys.

    Attributes:
        address: how an argument names it, as "stages.train.adapter"; "" = the top.
        only: of which choice these keys are, as "method: gptq"; "" = of all.
        keys: none where the meaning names another block that has the same.
    """

    address: str
    meaning: str
    only: str = ""
    keys: tuple[KeyReference, ...] = ()

    @property
    def title(self) -> str:
        """The address, and the choice that the keys belong to."""
        return ", ".join(filter(None, [self.address or "top level", self.only]))


def blocks() -> list[BlockReference]:
    """All blocks of the language, a block's own before those inside it."""
    return list(_walk("", [Recipe], {}))


def _walk(
    address: str, choices: list[type[ConfigModel]], told: dict
) -> Iterator[BlockReference]:
    """The blocks at an address, whose keys are those of one of `choices`."""
    name = frozenset(choices)
    if name in told:
        yield BlockReference(address, f"The keys of `{told[name]}`.")
        return
    told[name] = address
    parts = [fields(section) for section in choices]
    common = {
        key: info
        for key, info in parts[0].items()
        if all(_same(info, part.get(key)) for part in parts)
    }
    yield BlockReference(address, _meaning(choices), "", _keys(common))
    inner = dict(common)
    for section, part in zip(choices, parts, strict=True):
        if own := {key: info for key, info in part.items() if key not in common}:
            inner |= own
            tag, word = _tag(own)
            rest = {key: info for key, info in own.items() if key != tag}
            only = f"{tag}: {word}"
            yield BlockReference(address, _line(section.__doc__), only, _keys(rest))
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


def _meaning(choices: list[type[ConfigModel]]) -> str:
    """What a block is; of several choices, each says it of itself."""
    if len(choices) > 1:
        return "Keys that all choices below have."
    return _line(choices[0].__doc__)


def _keys(found: dict[str, FieldInfo]) -> tuple[KeyReference, ...]:
    return tuple(
        KeyReference(name, _values(info), _default(info), _line(info.description))
        for name, info in found.items()
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default is None:
        return "absent"
    if isinstance(info.default, ConfigModel):
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
    return "block" if issubclass(kind, ConfigModel) else KINDS[kind]


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


# --- from recipe.keys: `lmx keys`: what a recipe may say, told from the schema.


WIDTH = 88
HEAD = """\
# Every key of a recipe

Made from the schema by `lmx keys --markdown`; `lmx keys adapter` shows a part of it.

A heading is the address of a block. With a key behind it, it is the name of an
argument: `rank` below `stages.train.adapter` is
`lmx-train recipe.yaml stages.train.adapter.rank=8`. In a recipe every stage is an entry
of the list `stages`, as `- train:`. Absent is a key that is left out. Any other key is
an error, with the nearest one as a hint.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.description = "Show the keys of a recipe: values, defaults and meaning."
    parser.add_argument(
        "name", nargs="?", help="a block or a key, as train, adapter or adapter.rank"
    )
    parser.add_argument("--markdown", action="store_true", help="all of it as a page")


def run(arguments: argparse.Namespace) -> int:
    """Print the blocks, or a part; returns the exit code.

    Raises:
        UserError: nothing has this name.
    """
    if arguments.markdown:
        text = markdown()
    elif arguments.name:
        text = "\n".join(map(_block_text, _named(arguments.name)))
    else:
        lines = [f"  {block.title:<44}{block.meaning}"[:WIDTH] for block in blocks()]
        text = "\n".join(["blocks, each shown by `lmx keys NAME`:", *lines, ""])
    sys.stdout.write(text)
    return 0


def markdown() -> str:
    """The whole language as a page."""
    return "\n".join([HEAD, *map(_section, blocks())])


def _named(name: str) -> list[BlockReference]:
    """The blocks of this name, else those that have such a key, with it alone."""
    every, end = blocks(), f".{name}"
    if found := [b for b in every if f".{b.address}".endswith(end)]:
        return found
    found = [
        BlockReference(block.address, "", block.only, (key,))
        for block in every
        for key in block.keys
        if f".{block.address}.{key.name}".endswith(end)
    ]
    if not found:
        names = {b.address.rpartition(".")[2] for b in every}
        names |= {key.name for block in every for key in block.keys}
        hint = nearest(name, sorted(names - {""}))
        raise UserError(f"nothing in a recipe is called '{name}'", hint=hint)
    return found


def _block_text(block: BlockReference) -> str:
    """A block for the terminal."""
    lines = [block.title, *_wrapped(block.meaning, 2)]
    for key in block.keys:
        lines += ["", *_wrapped(f"{key.name}: {key.values}; {_default_text(key)}", 2)]
        lines += _wrapped(key.meaning, 6)
    return "\n".join(lines) + "\n"


def _default_text(key: KeyReference) -> str:
    return key.default if key.default == "required" else f"default {key.default}"


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space)


def _section(block: BlockReference) -> str:
    """A block as a part of the page."""
    if block.only:
        title = f"### `{block.address}`, `{block.only}`"
    else:
        title = f"## `{block.address}`" if block.address else "## Top level"
    parts = [f"{title}\n", f"{_escaped(block.meaning)}\n"]
    if block.keys:
        rows = [
            f"| `{key.name}` | {_escaped(key.values)} | {_escaped(key.default)} "
            f"| {_escaped(key.meaning)} |"
            for key in block.keys
        ]
        head = ["| key | values | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows, ""]))
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """As markdown in a table: bars are escaped, and outside of code marks, too."""
    parts = re.split("(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(
        p if p.startswith("`") else re.sub("([<*])", r"\\\1", p) for p in parts
    )
