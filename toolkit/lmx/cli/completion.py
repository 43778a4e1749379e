"""Completion in shells (argcomplete): verbs, options, recipes, keys of overrides."""

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line

from ..config import yaml_io
from ..config.bundled import bundled_recipes
from ..config.messages import keys
from ..config.schema import RecipeConfig
from ..errors import UserError
from ..run import terminal

SHELLS = ("bash", "zsh", "fish")


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx completion`."""
    parser.description = (
        "Print the completion script of a shell. bash, in ~/.bashrc, or zsh, in "
        '~/.zshrc after compinit: eval "$(lmx completion bash)". fish: '
        "lmx completion fish > ~/.config/fish/completions/lmx.fish"
    )
    parser.add_argument("shell", choices=SHELLS)


def completion(arguments: argparse.Namespace) -> int:
    """Print the script; the exit code is 0."""
    programs = ["lmx", "lmx-train"]
    terminal.write_out(argcomplete.shellcode(programs, shell=arguments.shell) + "\n")
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request for completions, and exit."""
    for action in parser._actions:
        if completer := COMPLETERS.get(f"{parser.prog} {action.dest}"):
            action.completer = completer
    argcomplete.autocomplete(parser, always_complete_options="long")


def complete_verb(
    parser: argparse.ArgumentParser,
    parsers: dict[str, Callable[[], argparse.ArgumentParser]],
) -> None:
    """Answer for `lmx`: complete the verb, else the arguments of the verb.

    Args:
        parser: the parser of the verb.
        parsers: the parser of each verb's arguments.
    """
    point = int(os.environ["COMP_POINT"])
    before = split_line(os.environ["COMP_LINE"], point)[3]
    if len(before) > 1 and before[1] in parsers:
        # The number of the word that is the program.
        os.environ["_ARGCOMPLETE"] = "2"
        parser = parsers[before[1]]()
    complete(parser)


def recipe_names(prefix: str, **_: Any) -> list[str]:
    """Included recipes, and YAML files."""
    return [*bundled_recipes(), *FilesCompleter(("yaml", "yml"))(prefix)]


def override_keys(
    prefix: str, parsed_args: argparse.Namespace, **_: Any
) -> Iterator[str]:
    """Keys as `key=`; after it, the values that the key may have."""
    kinds, every = _stage_kinds(parsed_args.recipe), dict(keys(RecipeConfig))
    # Lists and mappings are set as a whole.
    whole = [
        f"{address}."
        for address, info in every.items()
        if get_origin(info.annotation) in (list, dict) and address != "stages"
    ]
    for address, info in every.items():
        if address.startswith(tuple(whole)):
            continue
        for key in _numbered(address, kinds):
            if not prefix.startswith(f"{key}="):
                yield f"{key}="
            else:
                yield from (f"{key}={value}" for value in _choices(info.annotation))


def schema_names(**_: Any) -> set[str]:
    """Names of blocks and keys."""
    return {part for address, _ in keys(RecipeConfig) for part in address.split(".")}


# By program and argument.
COMPLETERS: dict[str, Callable] = {
    "lmx-train recipe": recipe_names,
    "lmx-train overrides": override_keys,
    "lmx schema name": schema_names,
}


def _stage_kinds(recipe: str | None) -> list[str] | None:
    """The kind of each stage of a recipe; None if it cannot be read."""
    path = bundled_recipes().get(recipe or "") or Path(os.path.expanduser(recipe or ""))
    try:
        data = yaml_io.read(path.read_text("utf-8")).data
    except (OSError, UnicodeDecodeError, UserError):
        return None
    stages = data.get("stages") if isinstance(data, dict) else None
    entries = stages if isinstance(stages, list) else []
    return [next(iter(e), "") if isinstance(e, dict) else "" for e in entries]


def _numbered(address: str, kinds: list[str] | None) -> list[str]:
    """An address as the recipe needs it: with the number of one of several stages."""
    first, _, rest = address.partition(".")
    if first != "stages":
        return [address]
    kind, _, key = rest.partition(".")
    if not key:
        return []
    if kinds is None:
        return [address]
    numbers = [number for number, name in enumerate(kinds, 1) if name == kind]
    if len(numbers) == 1:
        return [address]
    return [f"stages.{number}.{rest}" for number in numbers]


def _choices(annotation: Any) -> list[str]:
    """The values of a type that are words."""
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    return [value for part in get_args(annotation) for value in _choices(part)]
