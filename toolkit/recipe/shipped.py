"""The recipes that travel with the package, and all that a recipe can name."""

import os
from pathlib import Path

from ..errors import UserError
from ..registry import entries

_PACKAGE = Path(__file__).parents[1]
_CARRIED = _PACKAGE / "shipped"
# A wheel carries recipes and small data inside; a checkout keeps them beside.
SHIPPED = _CARRIED if _CARRIED.is_dir() else _PACKAGE.parent


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted((SHIPPED / "recipes").glob("*.yaml"))}


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
    known = recipes()
    shipped = SHIPPED / path
    if name in known or shipped.is_file():
        return known.get(name, shipped)
    from .messages import nearest

    raise UserError(f"no such recipe: '{name}'", hint=nearest(path.stem, known))


def listing() -> str:
    """The shipped recipes with their first comment, and all that has a name."""
    from ..quant.settings import METHODS
    from .messages import fields
    from .schema import TRACKERS, Stage

    formats = entries("toolkit.export", "FORMAT")
    stages = {kind: info.description for kind, info in fields(Stage).items()}
    return "\n\n".join(
        [
            _table("recipes", {n: _comment(path) for n, path in recipes().items()}),
            _table("stages", stages),
            _table("quantization methods", _summaries(METHODS)),
            _table("export formats", _summaries(formats)),
            _table("trackers", _summaries(TRACKERS)),
        ]
    )


def _summaries(modules: dict) -> dict[str, str]:
    return {name: module.__doc__.splitlines()[0] for name, module in modules.items()}


def _comment(path: Path) -> str:
    lines = path.read_text("utf-8").splitlines()
    return next((x.lstrip("# ") for x in lines if x.startswith("#")), "")


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join([f"{title}:", *(f"  {k:<{width}}  {v}" for k, v in rows.items())])
