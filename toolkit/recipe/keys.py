"""`lmx keys`: what a recipe may say, told from the schema."""

import argparse
import re
import sys
import textwrap

from ..errors import UserError
from .messages import nearest
from .reference import Block, Key, blocks

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
        text = "\n".join(map(_text, _named(arguments.name)))
    else:
        lines = [f"  {block.title:<44}{block.meaning}"[:WIDTH] for block in blocks()]
        text = "\n".join(["blocks, each shown by `lmx keys NAME`:", *lines, ""])
    sys.stdout.write(text)
    return 0


def markdown() -> str:
    """The whole language as a page."""
    return "\n".join([HEAD, *map(_section, blocks())])


def _named(name: str) -> list[Block]:
    """The blocks of this name, else those that have such a key, with it alone."""
    every, end = blocks(), f".{name}"
    if found := [b for b in every if f".{b.address}".endswith(end)]:
        return found
    found = [
        Block(block.address, "", block.only, (key,))
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


def _text(block: Block) -> str:
    """A block for the terminal."""
    lines = [block.title, *_wrapped(block.meaning, 2)]
    for key in block.keys:
        lines += ["", *_wrapped(f"{key.name}: {key.values}; {_default(key)}", 2)]
        lines += _wrapped(key.meaning, 6)
    return "\n".join(lines) + "\n"


def _default(key: Key) -> str:
    return key.default if key.default == "required" else f"default {key.default}"


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, WIDTH, initial_indent=space, subsequent_indent=space)


def _section(block: Block) -> str:
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
