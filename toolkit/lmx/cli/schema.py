"""`lmx schema` and `lmx-train --list`: the recipe schema, methods and formats."""

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from ..config.key_hints import addresses_of
from ..config.loader import SWITCHES
from ..config.messages import fields, nearest
from ..config.schema import RecipeConfig, StageEntry
from ..errors import UserError
from ..run import terminal

WIDTH = 88
HEAD = """\
# Recipe reference

Generated from the schema by `lmx schema --markdown`. `lmx schema adapter` shows one
block. [Write a recipe](training.md#write-a-recipe) says how to start one.

A heading is the address of a block. With the name of a key it is an override:
`lmx-train recipe.yaml stages.train.adapter.rank=8` sets `rank` in
`stages.train.adapter`. In a recipe, every stage is an entry of the list `stages`, as in
`- train:`. The default `absent` means that the key is not set. Any other key is an
error; its message suggests the nearest key.
"""
OVERVIEW = """\
`lmx schema NAME` shows a block, a key or a value: `lmx schema train`,
`lmx schema learning_rate`, `lmx schema gptq`. All blocks, each with its keys:
"""
TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "block",
}
LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}
# Stands for the keys of a mapping, which the user chooses.
PATTERN = "<pattern>"


# YAML 1.2, which editors read, takes these words for text. The loader takes any case.
_WORDS = "|".join(
    "".join(f"[{letter.upper()}{letter}]" for letter in word) for word in SWITCHES
)


class _EditorSchema(GenerateJsonSchema):
    """Pydantic's JSON Schema with what an editor shows and inserts."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def bool_schema(self, schema: Any) -> JsonSchemaValue:
        return {
            "type": ["boolean", "string"],
            "pattern": f"^({_WORDS})$",
            "patternErrorMessage": "expected true or false",
        }

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        # An editor would insert a whole block, or null for an absent key.
        if isinstance(schema.get("default"), BaseModel | None):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def tagged_union_schema(self, schema: Any) -> JsonSchemaValue:
        # `discriminator` is OpenAPI's. Editors choose by the constant `method`.
        union = super().tagged_union_schema(schema)
        union.pop("discriminator", None)
        return union


def recipe_schema() -> dict:
    """The JSON Schema of a recipe (draft 2020-12), for editors.

    It accepts every recipe that the loader accepts. It knows types, limits, choices and
    key names; rules that need two keys, files or models are the loader's alone.
    """
    schema = RecipeConfig.model_json_schema(schema_generator=_EditorSchema)
    head = {"$schema": _EditorSchema.schema_dialect, "title": "lmx recipe"}
    return head | _on_lines(schema)


def _on_lines(node: Any) -> Any:
    """The node without titles of blocks, with every description on one line."""
    if isinstance(node, list):
        return [_on_lines(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: " ".join(value.split())
        if key == "description" and isinstance(value, str)
        else _on_lines(value)
        for key, value in node.items()
        if key != "title" or not isinstance(value, str)
    }


@dataclass(frozen=True)
class Block:
    """A block of keys.

    Attributes:
        address: dotted path, e.g. "stages.train.adapter"; "" = the top level.
        only: the variant with these keys, e.g. "method: gptq"; "" = all variants.
        keys: JSON Schema by name; empty if `meaning` refers to another block.
    """

    address: str
    meaning: str
    only: str = ""
    keys: dict[str, dict] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The address and the variant."""
        return ", ".join(filter(None, [self.address or "top level", self.only]))


@cache
def blocks() -> list[Block]:
    """All blocks of the schema, each before its inner blocks."""
    root = recipe_schema()
    definitions, seen = root["$defs"], {}

    def walk(address: str, variants: list[dict]) -> Iterator[Block]:
        """The blocks at an address that holds one of `variants`, and what is inside."""
        if (name := json.dumps(variants)) in seen:
            yield Block(address, f"The keys of `{seen[name]}`.")
            return
        seen[name] = address
        first, *others = [_keys(variant) for variant in variants]
        common = {k: v for k, v in first.items() if all(o.get(k) == v for o in others)}
        meaning = variants[0]["description"]
        if others:
            meaning = "The keys of one of the variants below."
            meaning = "Keys that all variants below have." if common else meaning
        yield Block(address, meaning, "", common)
        inner = dict(common)
        # The key that tells the variants apart is constant in some of them.
        tags = {k for keys in (first, *others) for k, v in keys.items() if "const" in v}
        for variant, keys in zip(variants, [first, *others], strict=True):
            extra = {key: node for key, node in keys.items() if key not in common}
            inner |= extra
            for tag in tags & extra.keys():
                node = extra[tag] if "enum" in extra[tag] else extra.pop(tag)
                only = f"{tag}: {', '.join(_choices(node))}"
                yield Block(address, variant["description"], only, extra)
        for key, node in inner.items():
            below: dict[str, dict[str, dict]] = {}
            for path, name in _inner(f"{address}.{key}".lstrip("."), node):
                below.setdefault(path, {})[name] = definitions[name]
            for path, found in below.items():
                yield from walk(path, list(found.values()))

    return list(walk("", [root]))


def _keys(block: dict) -> dict[str, dict]:
    """The keys of a block, with `required` where it is."""
    required = block.get("required", [])
    return {k: v | {"required": k in required} for k, v in block["properties"].items()}


def _alternatives(node: dict) -> list[dict]:
    parts = node.get("anyOf", node.get("oneOf"))
    return [n for part in parts for n in _alternatives(part)] if parts else [node]


def _inner(address: str, node: dict) -> Iterator[tuple[str, str]]:
    """The blocks that a value, or the entries of its list or mapping, may be: address
    and name."""
    for part in _alternatives(node):
        if "$ref" in part:
            yield address, part["$ref"].rpartition("/")[2]
        if "items" in part:
            yield from _inner(address, part["items"])
        if isinstance(values := part.get("additionalProperties"), dict):
            yield from _inner(f"{address}.{PATTERN}", values)


def _default(node: dict) -> str:
    if node["required"]:
        return "required"
    if "default" in node:
        return f"default {json.dumps(node['default'])}".replace('"', "")
    is_absent = {"type": "null"} in _alternatives(node)
    return "default absent" if is_absent else "its defaults"


def _values(node: dict, separator: str = ", or ") -> str:
    """Accepted values as text, without null where it is the default."""
    texts = [_type(part) for part in _alternatives(node)]
    texts = [text for text in texts if text != "null" or "default" in node]
    return separator.join(dict.fromkeys(texts))


def _type(node: dict) -> str:
    if choices := node.get("enum", [node["const"]] if "const" in node else None):
        return ", ".join(json.dumps(value).strip('"') for value in choices)
    if "items" in node:
        return f"list of {_values(node['items'], ' or ')}"
    if isinstance(inside := node.get("additionalProperties"), dict):
        return f"mapping of text to {_values(inside, ' or ')}"
    kind = node.get("type", "object")
    limits = [f"{sign} {node[key]:g}" for key, sign in LIMITS.items() if key in node]
    name = TYPES[kind if isinstance(kind, str) else kind[0]]
    return f"{name} {', '.join(limits)}".strip()


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx schema`."""
    parser.description = "Show the keys of a recipe with their values and defaults."
    parser.add_argument(
        "name",
        nargs="?",
        help="a block, a key or a value, e.g. train, adapter.rank or gptq; "
        "without it, all blocks and keys are listed",
    )
    parser.add_argument("--markdown", action="store_true", help="print docs/recipes.md")
    parser.add_argument(
        "--json", action="store_true", help="print the JSON Schema, e.g. for an editor"
    )


def schema(arguments: argparse.Namespace) -> int:
    """Print the blocks, or one of them; returns the exit code.

    Raises:
        UserError: no block or key has this name.
    """
    if arguments.json:
        text = json.dumps(recipe_schema(), indent=2) + "\n"
    elif arguments.markdown:
        text = markdown()
    elif arguments.name:
        text = "\n".join(_text(b).replace("`", "") for b in _named(arguments.name))
    else:
        text = "\n".join([OVERVIEW, *map(_block_summary, blocks()), ""])
    terminal.write_out(text)
    return 0


def markdown() -> str:
    """The whole schema as a page."""
    sections = (f"{'###' if b.only else '##'} {_text(b)}" for b in blocks())
    return "\n".join([HEAD, *sections])


def _text(block: Block) -> str:
    """A block with its keys, as text for the terminal or in Markdown."""
    address = f"`{block.address}`" if block.address else "top level"
    lines = [f"{address}, `{block.only}`" if block.only else address, ""]
    if block.meaning:
        lines += [*_wrapped(block.meaning), ""]
    for key, node in block.keys.items():
        values = f"- `{key}`: {_values(node)}; {_default(node)}. {node['description']}"
        lines += _wrapped(values, rest="  ")
    return "\n".join(lines).rstrip() + "\n"


def _named(name: str) -> list[Block]:
    """The blocks with this address, title or variant; else what has such a key, else
    such a value."""
    every, end = blocks(), f".{name}"
    matches = (
        [b for b in every if f".{b.address}".endswith(end) or b.title == name]
        or _with_key(lambda b, key, _: f".{b.address}.{key}".endswith(end))
        or [b for b in every if name in re.split("[:, ]+", b.only)]
        or _with_key(lambda _, key, node: name in _choices(node))
    )
    if not matches:
        hint = _hint(name)
        raise UserError(f"a recipe has no block, key or value '{name}'", hint=hint)
    return matches


def _with_key(test: Callable[[Block, str, dict], bool]) -> list[Block]:
    """Blocks cut down to one key that passes the test."""
    return [
        replace(block, meaning="", keys={key: node})
        for block in blocks()
        for key, node in block.keys.items()
        if test(block, key, node)
    ]


def _choices(node: dict) -> list[str]:
    """The words that a key, or an entry of its list, may have as its value."""
    parts = _alternatives(node)
    inside = [word for p in parts if "items" in p for word in _choices(p["items"])]
    return inside + [word for p in parts for word in p.get("enum", [p.get("const")])]


def _hint(name: str) -> str:
    """What a name that is not in the schema may stand for."""
    if known := addresses_of(name):
        return f"called {' or '.join(known)} here"
    hint = nearest(name, sorted({key for block in blocks() for key in block.keys}))
    is_list = hint.startswith("available")
    return "`lmx schema` lists all blocks and keys" if is_list else hint


def _block_summary(block: Block) -> str:
    """The title and the names of the keys."""
    names = ", ".join(block.keys)
    text = names if names or block.only else block.meaning.replace("`", "")
    return "\n".join([block.title, *_wrapped(text, "    ", "    ")])


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    indents = {"initial_indent": first, "subsequent_indent": rest}
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, **indents)


def listing() -> str:
    """Bundled recipes with their first comment; stages, methods, formats, trackers."""
    from ..config.bundled import summaries
    from ..convert.exporters import FORMATS
    from ..quantization.ptq.methods import METHODS
    from ..run.trackers import TRACKERS

    stages = {kind: info.description for kind, info in fields(StageEntry).items()}
    return "\n\n".join(
        [
            _list("recipes", summaries()),
            _list("stages", stages),
            _list("quantization methods", _summaries(METHODS)),
            _list("export formats", _summaries(FORMATS)),
            _list("trackers", _summaries(TRACKERS)),
        ]
    )


def _summaries(modules: dict) -> dict[str, str]:
    return {name: module.__doc__.splitlines()[0] for name, module in modules.items()}


def _list(title: str, items: dict[str, str]) -> str:
    width = max(map(len, items), default=0)
    lines = [f"  {name:<{width}}  {about}" for name, about in items.items()]
    return "\n".join([f"{title}:", *lines])
