"""The recipes that travel with the package, and all that a recipe can name."""

import os
from pathlib import Path

from ..errors import UserError

_PACKAGE = Path(__file__).parents[1]
_CARRIED = _PACKAGE / "shipped"
# A wheel carries recipes and small data inside; a checkout keeps them beside.
BUNDLED = _CARRIED if _CARRIED.is_dir() else _PACKAGE.parents[1]


def bundled_recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted((BUNDLED / "recipes").glob("*.yaml"))}


def locate(name: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped recipe.

    Raises:
        UserError: neither exists.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError("a recipe is a YAML file; this is a folder", place=name)
    known = bundled_recipes()
    shipped = BUNDLED / path
    if name in known or shipped.is_file():
        return known.get(name, shipped)
    from .messages import nearest

    raise UserError(f"no such recipe: '{name}'", hint=nearest(path.stem, known))
