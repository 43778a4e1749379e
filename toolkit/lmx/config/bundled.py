"""The recipes and the data that come with lmx, and how to find them by name.

The first line of a recipe may name its JSON Schema for editors that use
yaml-language-server (VS Code, Neovim, Helix, Zed and others).
"""

import os
from difflib import get_close_matches
from pathlib import Path

from ..errors import UserError

SCHEMA_LINE = "# yaml-language-server: $schema="
_PACKAGE = Path(__file__).parents[1]
_IN_WHEEL = _PACKAGE / "shipped"
# In a wheel, recipes and data are inside the package; in a checkout, next to it.
BUNDLED = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parents[1]


def bundled_data(path: Path) -> Path | None:
    """What comes with lmx under this path in data/; None if there is nothing."""
    is_in_data = path.parts[:1] == ("data",) and len(path.parts) > 1
    bundled = BUNDLED / path
    # Unlike pathlib's, it never raises.
    return bundled if is_in_data and os.path.exists(bundled) else None


def bundled_recipes() -> dict[str, Path]:
    """The bundled recipes by name."""
    return {path.stem: path for path in sorted((BUNDLED / "recipes").glob("*.yaml"))}


def summaries() -> dict[str, str]:
    """The first comment of every bundled recipe, by name."""
    titles = {}
    for name, path in bundled_recipes().items():
        lines = without_schema_line(path.read_text("utf-8")).split("\n")
        comments = (line.lstrip("# ") for line in lines if line.startswith("#"))
        titles[name] = next(comments, "")
    return titles


def schema_file() -> Path:
    """The JSON Schema of a recipe, for editors; beside the bundled recipes."""
    return BUNDLED / "recipes" / "recipe.schema.json"


def without_schema_line(text: str) -> str:
    """The text of a recipe without the address of its schema, which may be a private
    path."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(SCHEMA_LINE))


def locate(name: str) -> Path:
    """The file of a recipe, given by path or by the name of a bundled recipe.

    Raises:
        UserError: there is no such file or bundled recipe.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        raise UserError("a recipe is a YAML file; this is a folder", place=name)
    if os.path.exists(path):  # unlike pathlib's, it never raises
        return path
    known = bundled_recipes()
    bundled = BUNDLED / path
    if name in known or bundled.is_file():
        return known.get(name, bundled)
    from .messages import nearest

    beside = [file.name for file in path.parent.glob("*.yaml")]
    close = get_close_matches(path.name, beside, n=1)
    hint = nearest(path.name, close) if close else nearest(path.stem, known)
    raise UserError(f"no such recipe: '{name}'", hint=hint)
