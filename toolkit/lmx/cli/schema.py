"""`lmx schema` and `lmx-train --list`: the recipe schema, methods and formats."""

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..config.json_schema import recipe_schema
from ..config.key_hints import addresses_of
from ..config.messages import fields, nearest
from ..config.schema import RecipeConfig, StageEntry
from ..errors import UserError
from ..run import terminal

WIDTH = 88
HEAD = """\
# Recipe reference

Generated from the schema by `lmx schema --markdown`. `lmx schema adapter` shows one
block.

A heading is the address of a block. With the name of a key it is an override:
`lmx-train recipe.yaml stages.train.adapter.rank=8` sets `rank` in
`stages.train.adapter`. In a recipe, every stage is an entry of the list `stages`, as in
`- train:`. The default `absent` means that the key is not set. Any other key is an
error; its message suggests the nearest key.

## Write a recipe

`lmx init` asks for your model, data, task and bits, and writes a commented recipe; the
options `--model`, `--data`, `--task`, `--bits` and `--output` answer the questions. For
a quantized model, `qat` continues from its codes.
`lmx recipes` lists the included recipes, and `lmx recipes copy NAME` writes one beside
you. Neither overwrites a file.

```bash
lmx init --model Qwen/Qwen3-0.6B --data data/skills/train.jsonl --output mine.yaml
lmx recipes copy qat_4bit tiny.yaml
```

Editors with yaml-language-server (VS Code with the YAML extension, Neovim, Helix, Zed)
then check the recipe while you type, complete keys and values, and show their meaning.
The first line of these recipes tells them where the JSON Schema is:
`# yaml-language-server: $schema=...`. `lmx schema --json` prints the schema, for
another place. The schema knows keys, types and limits. `lmx-train RECIPE --dry-run`
also checks files and rules of several keys.

Shells complete verbs, options, included recipes and the keys of overrides. For bash,
add `eval "$(lmx completion bash)"` to `~/.bashrc`. For zsh, add
`eval "$(lmx completion zsh)"` to `~/.zshrc`, after `compinit`. For fish:
`lmx completion fish > ~/.config/fish/completions/lmx.fish`.
"""
OVERVIEW = """\
`lmx schema NAME` shows a block, a key or a value: `lmx schema train`,
`lmx schema learning_rate`, `lmx schema gptq`. All blocks, each with its keys:
"""
KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
# Words of `KeyReference.values` that are no values.
TYPE_WORDS = {"list", "of", "or", "mapping", "to", "block"} | {
    word for kind in KINDS.values() for word in kind.split()
}
LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}
# Stands for the keys of a mapping, which the user chooses.
PATTERN = "<pattern>"


@dataclass(frozen=True)
class KeyReference:
    """A key: its accepted values, default and meaning, as text."""

    name: str
    values: str
    default: str
    meaning: str


@dataclass(frozen=True)
class BlockReference:
    """A block of keys.

    Attributes:
        address: dotted path, e.g. "stages.train.adapter"; "" = the top level.
        only: the variant with these keys, e.g. "method: gptq"; "" = all variants.
        keys: empty if `meaning` refers to another block with the same keys.
    """

    address: str
    meaning: str
    only: str = ""
    keys: tuple[KeyReference, ...] = ()

    @property
    def title(self) -> str:
        """The address and the variant."""
        return ", ".join(filter(None, [self.address or "top level", self.only]))


def blocks() -> list[BlockReference]:
    """All blocks of the schema, each before its inner blocks."""
    # The values of a key after validation, not all that a recipe may write for them.
    top = RecipeConfig.model_json_schema(mode="serialization")
    return list(_walk("", [top], top["$defs"], {}))


def _walk(
    address: str, variants: list[dict], definitions: dict, seen: dict
) -> Iterator[BlockReference]:
    """The blocks at an address that holds one of `variants`, and their inner blocks.

    Args:
        definitions: of the JSON Schema.
        seen: address by variants, of blocks that were yielded before.
    """
    name = tuple(sorted(variant["title"] for variant in variants))
    if name in seen:
        yield BlockReference(address, f"The keys of `{seen[name]}`.")
        return
    seen[name] = address
    keys_of = [variant.get("properties", {}) for variant in variants]
    common = {
        key: node
        for key, node in keys_of[0].items()
        if all(node == keys.get(key) for keys in keys_of)
    }
    meaning = _one_line(variants[0].get("description"))
    if len(variants) > 1:
        meaning = "Keys that all variants below have."
        if not common:
            meaning = "The keys of one of the variants below."
    yield BlockReference(address, meaning, "", _key_references(common))
    inner = dict(common)
    for variant, keys in zip(variants, keys_of, strict=True):
        extra = {key: node for key, node in keys.items() if key not in common}
        if not extra:
            continue
        inner |= extra
        tag = next(key for key, node in extra.items() if "const" in node)
        meaning = _one_line(variant.get("description"))
        only = f"{tag}: {extra.pop(tag)['const']}"
        yield BlockReference(address, meaning, only, _key_references(extra))
    for key, node in inner.items():
        if below := [definitions[name] for name in dict.fromkeys(_references(node))]:
            step = f"{key}.{PATTERN}" if "additionalProperties" in node else key
            yield from _walk(f"{address}.{step}".lstrip("."), below, definitions, seen)


def _references(node: Any) -> Iterator[str]:
    """The names of the blocks that a key may hold."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "$ref":
            yield value.rpartition("/")[2]
        elif isinstance(value, dict | list) and key not in ("default", "discriminator"):
            yield from _references(value)


def _key_references(keys: dict[str, dict]) -> tuple[KeyReference, ...]:
    return tuple(
        KeyReference(
            name, _values(node), _default(node), _one_line(node.get("description"))
        )
        for name, node in keys.items()
    )


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _default(node: dict) -> str:
    if "default" not in node:
        return "required"
    default = node["default"]
    if isinstance(default, dict) and "additionalProperties" not in node:
        return "its defaults"
    return "absent" if default is None else json.dumps(default).strip('"')


def _values(node: dict) -> str:
    """Accepted values as text, without null where it is the default."""
    values = _alternatives(node)
    is_absent = node.get("default", "") is None
    return ", or ".join(v for v in values if not (is_absent and v == "null"))


def _alternatives(node: dict) -> list[str]:
    """The alternatives of a key, each as text."""
    if parts := node.get("anyOf") or node.get("oneOf"):
        return list(dict.fromkeys(t for part in parts for t in _alternatives(part)))
    if "$ref" in node:
        return ["block"]
    if "const" in node or "enum" in node:
        choices = node.get("enum", [node.get("const")])
        return [", ".join(json.dumps(value).strip('"') for value in choices)]
    if items := node.get("items"):
        return [f"list of {' or '.join(_alternatives(items))}"]
    if values := node.get("additionalProperties"):
        return [f"mapping of text to {' or '.join(_alternatives(values))}"]
    limits = [f"{sign} {node[key]:g}" for key, sign in LIMITS.items() if key in node]
    return [" ".join([KINDS[node["type"]], ", ".join(limits)]).strip()]


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
        text = "\n".join(map(_block_text, _named(arguments.name)))
    else:
        text = "\n".join([OVERVIEW, *map(_block_summary, blocks()), ""])
    terminal.write_out(text)
    return 0


def markdown() -> str:
    """The whole schema as a page."""
    return "\n".join([HEAD, *map(_section, blocks())])


def _named(name: str) -> list[BlockReference]:
    """The blocks with this address, or the block with this title; else what has such
    a key or value."""
    every, end = blocks(), f".{name}"
    by_address = [b for b in every if f".{b.address}".endswith(end)]
    matches = (
        by_address
        or [b for b in every if b.title == name]
        or _with_key(lambda b, key: f".{b.address}.{key.name}".endswith(end))
        or [b for b in every if name in b.only.split(": ")]
        or _with_key(lambda _, key: name in _words(key.values))
    )
    if not matches:
        hint = _hint(name)
        raise UserError(f"a recipe has no block, key or value '{name}'", hint=hint)
    return matches


def _with_key(
    test: Callable[[BlockReference, KeyReference], bool],
) -> list[BlockReference]:
    """Blocks cut down to one key that passes the test."""
    return [
        BlockReference(block.address, "", block.only, (key,))
        for block in blocks()
        for key in block.keys
        if test(block, key)
    ]


def _words(values: str) -> set[str]:
    return set(re.split("[ ,]+", values)) - TYPE_WORDS


def _hint(name: str) -> str:
    """What a name that is not in the schema may stand for."""
    if known := addresses_of(name):
        return f"called {' or '.join(known)} here"
    names = {block.address.rpartition(".")[2] for block in blocks()}
    names |= {key.name for block in blocks() for key in block.keys}
    names = sorted(names - {"", PATTERN})
    if inside := [each for each in names if name in each]:
        return f"names with this part: {', '.join(inside)}"
    hint = nearest(name, names)
    if hint.startswith("available"):
        return "`lmx schema` lists all blocks and keys"
    return hint


def _block_summary(block: BlockReference) -> str:
    """The title and the names of the keys."""
    names = ", ".join(key.name for key in block.keys)
    text = names if names or block.only else block.meaning.replace("`", "")
    return "\n".join([block.title, *_wrapped(text, 4)])


def _block_text(block: BlockReference) -> str:
    """A block as text for the terminal."""
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
    """A block as a section of the page."""
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
    """Escape bars, and outside of code spans also < and *."""
    parts = re.split("(`[^`]*`)", text.replace("|", r"\|"))
    return "".join(
        p if p.startswith("`") else re.sub("([<*])", r"\\\1", p) for p in parts
    )


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
