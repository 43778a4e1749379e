"""`lmx schema` and `lmx-train --list`: the recipe schema, methods and formats."""

import argparse
import json
import re
import textwrap
from dataclasses import dataclass, field, replace
from functools import cache

from ..config.json_schema import alternatives, recipe_schema, sections
from ..config.key_hints import tables
from ..config.messages import nearest
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
    found: list[Block] = []
    seen: dict[str, str] = {}
    repeated: tuple[str, ...] = ()
    for address, schemas in sections().items():
        if address.startswith(repeated):
            continue
        first = seen.setdefault(json.dumps(schemas), address)
        if first == address:
            found += _variants(address, schemas)
        else:
            found.append(Block(address, f"The keys of `{first}`."))
            repeated += (f"{address}.",)
    return found


def _variants(address: str, schemas: list[dict]) -> list[Block]:
    """The block at an address with the keys that all its schemas have, and one for the
    further keys of each schema."""
    variants = []
    for schema in schemas:
        required = schema.get("required", [])
        nodes = schema["properties"].items()
        variants.append({k: node | {"required": k in required} for k, node in nodes})
    first, *others = variants
    if not others:
        return [Block(address, schemas[0]["description"], keys=first)]
    common = {k: v for k, v in first.items() if all(o.get(k) == v for o in others)}
    meaning = "Keys that all variants below have."
    if not common:
        meaning = "The keys of one of the variants below."
    found = [Block(address, meaning, keys=common)]
    # The key that tells the variants apart is constant in some of them.
    [tag] = {key for keys in variants for key, node in keys.items() if "const" in node}
    for schema, keys in zip(schemas, variants, strict=True):
        only = f"{tag}: {', '.join(_choices(keys[tag]))}"
        hidden = {*common, tag} if "const" in keys[tag] else {*common}
        extra = {key: node for key, node in keys.items() if key not in hidden}
        found.append(Block(address, schema["description"], only, extra))
    return found


def _values(node: dict, separator: str = ", or ") -> str:
    """Accepted values as text, without null where it is the default."""
    texts = [_type(part) for part in alternatives(node)]
    texts = [text for text in texts if text != "null" or "default" in node]
    return separator.join(dict.fromkeys(texts))


def _type(node: dict) -> str:
    if choices := node.get("enum", [node["const"]] if "const" in node else None):
        return ", ".join(json.dumps(value).strip('"') for value in choices)
    if "items" in node:
        return f"list of {_values(node['items'], ' or ')}"
    if isinstance(inside := node.get("additionalProperties"), dict):
        return f"mapping of text to {_values(inside, ' or ')}"
    kind = node["type"]
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
        lines = [OVERVIEW]
        for block in blocks():
            keys = ", ".join(block.keys)
            about = keys if keys or block.only else block.meaning.replace("`", "")
            lines += [block.title, *_wrapped(about, "    ", "    ")]
        text = "\n".join([*lines, ""])
    terminal.write_out(text)
    return 0


def markdown() -> str:
    """The whole schema as a page."""
    texts = (f"{'###' if b.only else '##'} {_text(b)}" for b in blocks())
    return "\n".join([HEAD, *texts])


def _text(block: Block) -> str:
    """A block with its keys, as text for the terminal or in Markdown."""
    address = f"`{block.address}`" if block.address else "top level"
    title = f"{address}, `{block.only}`" if block.only else address
    lines = [title, ""]
    if block.meaning:
        lines += [*_wrapped(block.meaning), ""]
    for key, node in block.keys.items():
        if node["required"]:
            default = "required"
        elif "default" in node:
            default = f"default {json.dumps(node['default'])}".replace('"', "")
        else:
            is_absent = {"type": "null"} in alternatives(node)
            default = "default absent" if is_absent else "its defaults"
        values = f"- `{key}`: {_values(node)}; {default}. {node['description']}"
        lines += _wrapped(values, rest="  ")
    return "\n".join(lines).rstrip() + "\n"


def _named(name: str) -> list[Block]:
    """The blocks with this address, title or variant; else what has such a key, else
    such a value.

    Raises:
        UserError: there is none.
    """
    every, end = blocks(), f".{name}"
    # Blocks cut down to one key.
    single = [
        replace(block, meaning="", keys={key: node})
        for block in every
        for key, node in block.keys.items()
    ]
    matches = (
        [b for b in every if f".{b.address}".endswith(end) or b.title == name]
        or [b for b in single if f".{b.address}.{next(iter(b.keys))}".endswith(end)]
        or [b for b in every if name in re.split("[:, ]+", b.only)]
        or [b for b in single if name in _choices(*b.keys.values())]
    )
    if matches:
        return matches
    if known := tables()["keys"].get(name):
        hint = f"called {' or '.join(known)} here"
    else:
        hint = nearest(name, sorted({key for block in every for key in block.keys}))
        if hint.startswith("available"):
            hint = "`lmx schema` lists all blocks and keys"
    raise UserError(f"a recipe has no block, key or value '{name}'", hint=hint)


def _choices(node: dict) -> list[str]:
    """The words that a key, or an entry of its list, may have as its value."""
    parts = alternatives(node)
    inside = [word for p in parts if "items" in p for word in _choices(p["items"])]
    return inside + [word for p in parts for word in p.get("enum", [p.get("const")])]


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    indents = {"initial_indent": first, "subsequent_indent": rest}
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, **indents)


def listing() -> str:
    """Bundled recipes with their first comment; stages, methods, formats, trackers."""
    from ..config.bundled import summaries
    from ..convert.exporters import FORMATS
    from ..quantization.ptq.methods import METHODS
    from ..run.trackers import TRACKERS

    kinds = sections()["stages"][0]["properties"]
    lists = {
        "recipes": summaries(),
        "stages": {kind: node["description"] for kind, node in kinds.items()},
    }
    tables = {"quantization methods": METHODS, "export formats": FORMATS}
    for title, modules in {**tables, "trackers": TRACKERS}.items():
        about = {name: m.__doc__.splitlines()[0] for name, m in modules.items()}
        lists[title] = about
    texts = []
    for title, items in lists.items():
        width = max(map(len, items), default=0)
        lines = [f"  {name:<{width}}  {about}" for name, about in items.items()]
        texts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(texts)
