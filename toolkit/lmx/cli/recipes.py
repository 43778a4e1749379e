"""`lmx recipes`: list the included recipes, and copy one to change it."""

import argparse
import os
from pathlib import Path

from ..config.bundled import bundled_recipes, locate, schema_file, summaries
from ..config.recipe_text import with_schema_line
from ..errors import UserError
from ..run import terminal
from ..run.fs import write_atomic


def add_recipes_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `lmx recipes`."""
    parser.description = (
        "List the included recipes. `lmx recipes copy NAME` writes one as a file of "
        "your own."
    )
    actions = parser.add_subparsers(dest="action", metavar="copy")
    copy = actions.add_parser("copy", help="copy an included recipe")
    copy.add_argument("name", choices=bundled_recipes(), metavar="NAME")
    copy.add_argument(
        "target", nargs="?", metavar="TARGET", help="file or folder; default: NAME.yaml"
    )


def recipes(arguments: argparse.Namespace) -> int:
    """Print the list, or copy a recipe; the exit code is 0.

    Raises:
        UserError: the target exists.
    """
    if arguments.action is None:
        items = summaries()
        width = max(map(len, items))
        lines = [f"{name:<{width}}  {about}\n" for name, about in items.items()]
        terminal.write_out("".join(lines))
        return 0
    source = locate(arguments.name)
    target = Path(os.path.expanduser(arguments.target or source.name))
    if target.is_dir():
        target /= source.name
    write_recipe(target, source.read_text("utf-8"))
    terminal.write_out(
        f"{target}\nThe paths in data/ are those of lmx's own small model and data: "
        f"replace them with yours.\nThen: lmx-train {target} --dry-run\n"
    )
    return 0


def write_recipe(target: Path, text: str) -> None:
    """Write a recipe that names the installed schema.

    Raises:
        UserError: the target exists, or a disk error.
    """
    require_new(target)
    schema = schema_file().resolve().as_uri()
    write_atomic(target, with_schema_line(text, schema))


def require_new(target: Path) -> None:
    """Refuse to overwrite a file.

    Raises:
        UserError: the target exists.
    """
    if target.exists() or target.is_symlink():
        raise UserError(
            "the file exists, and is not overwritten",
            place=str(target),
            hint="give another name",
        )
