"""`lmx schema` and `lmx-train --list`: the recipe schema, methods and formats."""

import argparse
import json
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ..config.base import ConfigModel
from ..config.json_schema import recipe_schema
from ..config.key_hints import addresses_of
from ..config.messages import fields, nearest, sections
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
KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}
# Words of `KeyReference.values` that are no values.
TYPE_WORDS = {"list", "of", "or", "mapping", "to", "block", "null"} | {
    word for kind in KINDS.values() for word in kind.split()
}
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
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
    return list(_walk("", [RecipeConfig], {}))


def _walk(
    address: str, variants: list[type[ConfigModel]], seen: dict
) -> Iterator[BlockReference]:
    """The blocks at an address that holds one of `variants`, and their inner blocks.

    Args:
        seen: address by variants, of blocks that were yielded before.
    """
    name = frozenset(variants)
    if name in seen:
        yield BlockReference(address, f"The keys of `{seen[name]}`.")
        return
    seen[name] = address
    keys_of = [fields(variant) for variant in variants]
    common = {
        key: info
        for key, info in keys_of[0].items()
        if all(_is_same_field(info, keys.get(key)) for keys in keys_of)
    }
    meaning = _one_line(variants[0].__doc__)
    if len(variants) > 1:
        meaning = "Keys that all variants below have."
        if not common:
            meaning = "The keys of one of the variants below."
    yield BlockReference(address, meaning, "", _key_references(common))
    inner = dict(common)
    for variant, keys in zip(variants, keys_of, strict=True):
        extra = {key: info for key, info in keys.items() if key not in common}
        if not extra:
            continue
        inner |= extra
        tag, value = _discriminator(extra)
        meaning, only = _one_line(variant.__doc__), f"{tag}: {value}"
        del extra[tag]
        yield BlockReference(address, meaning, only, _key_references(extra))
    for key, info in inner.items():
        if below := sections(info.annotation):
            step = f"{key}.{PATTERN}" if get_origin(info.annotation) is dict else key
            yield from _walk(f"{address}.{step}".lstrip("."), below, seen)


def _is_same_field(one: FieldInfo, other: FieldInfo | None) -> bool:
    names = ("annotation", "default", "description", "metadata")
    return other is not None and all(
        getattr(one, name) == getattr(other, name) for name in names
    )


def _discriminator(keys: dict[str, FieldInfo]) -> tuple[str, str]:
    """The key with one literal value, which selects the variant, and this value."""
    return next(
        (key, get_args(info.annotation)[0])
        for key, info in keys.items()
        if get_origin(info.annotation) is Literal
        and len(get_args(info.annotation)) == 1
    )


def _key_references(keys: dict[str, FieldInfo]) -> tuple[KeyReference, ...]:
    return tuple(
        KeyReference(name, _values(info), _default(info), _one_line(info.description))
        for name, info in keys.items()
    )


def _one_line(text: str | None) -> str:
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
    """Accepted values as text, without null where it is the default."""
    values = _alternatives(info.annotation, info.metadata)
    return ", or ".join(
        value for value in values if value != "null" or info.default is not None
    )


def _alternatives(annotation: Any, limits: list = ()) -> list[str]:
    """The alternatives of a type, each as text."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(inside[0], [*_flat(inside[1:]), *limits])
    if origin in (Union, UnionType):
        return list(
            dict.fromkeys(t for part in inside for t in _alternatives(part, limits))
        )
    if origin is Literal:
        return [", ".join(json.dumps(value).strip('"') for value in inside)]
    if origin is list:
        return [f"list of {' or '.join(_alternatives(inside[0]))}"]
    if origin is dict:
        values = " or ".join(_alternatives(inside[1]))
        return [f"mapping of {_type_name(inside[0])} to {values}"]
    if annotation is NoneType:
        return ["null"]
    return [_type_name(annotation) + _limits(limits)]


def _type_name(kind: type) -> str:
    return "block" if issubclass(kind, ConfigModel) else KINDS[kind]


def _flat(metadata: tuple) -> Iterator:
    """Limits of a type, including those inside a `Field`."""
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


def _limits(metadata: list) -> str:
    limits = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in LIMITS.items()
        if isinstance(getattr(item, name, None), int | float)
    ]
    return f" {', '.join(limits)}" if limits else ""


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
