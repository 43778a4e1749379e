"""A recipe file and its arguments become a checked recipe, or all faults at once."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import UserError
from . import yaml_io
from .errors import ConfigError, ConfigErrors, KeyPath
from .messages import Problem, explain, path_of
from .overrides import merge
from .schema import Recipe

Check = Callable[[dict, Callable[[str], Path | None]], list[Problem]]

SWITCHES = {"yes": True, "on": True, "no": False, "off": False}


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe and where it came from.

    Attributes:
        name: the file's stem, which names the run folder.
        text: the file as given.
        overrides: the arguments as given.
        root: where relative paths are looked for after the working directory.
        resolved: every value written out, as YAML that loads to the same recipe.
    """

    recipe: Recipe
    name: str
    path: Path
    text: str
    overrides: tuple[str, ...]
    root: Path
    resolved: str

    def find(self, relative: str) -> Path | None:
        """A file or folder from the working directory, else from the root."""
        return find(relative, self.root)


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), check: Check | None = None
) -> LoadedRecipe:
    """Read, override and check a recipe, without reading any weight.

    Args:
        check: the problems of raw recipe data that the schema does not see, given a
            function that finds files; None = check the schema alone.

    Raises:
        RecipeFaults: every fault of the file and the arguments.
        UserError: the file cannot be read.
    """
    path = Path(path)
    text = _text(path)
    document = yaml_io.read(text)
    if not isinstance(document.data, dict):
        raise ConfigErrors(path, text, document.faults or [_no_block(document.data)])
    root = root_of(path)
    origins, faults = merge(document.data, overrides)
    recipe, found = _validate(document.data)
    if check:
        found += check(document.data, lambda source: find(source, root))
    faults += document.faults
    faults += [
        _place(complaint, document, origins)
        for complaint in found
        if not _follows(complaint, document.unread)
    ]
    if faults:
        raise ConfigErrors(path, text, faults)
    resolved = yaml_io.write(_plain(recipe))
    return LoadedRecipe(recipe, path.stem, path, text, tuple(overrides), root, resolved)


def find(relative: str, root: Path) -> Path | None:
    """An existing path: absolute, from the working directory, or from `root`."""
    path = os.path.expanduser(relative)  # unlike pathlib's, it never raises
    candidates = (Path(path), root / path)
    return next((found for found in candidates if os.path.exists(found)), None)


def root_of(recipe: Path) -> Path:
    """The folder that holds the recipe's `recipes`, else the recipe's own folder."""
    above = recipe.resolve().parents
    return next((p.parent for p in above if p.name == "recipes"), above[0])


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot read the recipe: {reason}", place=str(path)) from error
    except UnicodeDecodeError as error:
        message = f"byte {error.start + 1} is not UTF-8 text"
        raise UserError(message, place=str(path)) from error


def _no_block(data: Any) -> ConfigError:
    if data is None:
        return ConfigError(
            "the recipe is empty", hint="`lmx-train --list` shows examples"
        )
    return ConfigError(
        "a recipe is a block of `key: value` lines", yaml_io.SourcePosition(1, 1)
    )


def _validate(data: dict) -> tuple[Recipe | None, list[Problem]]:
    try:
        return Recipe.model_validate(data), []
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    if any([_switch(error, data) for error in errors]):
        return _validate(data)
    return None, [explain(error, data) for error in errors]


def _switch(error: dict, data: Any) -> bool:
    """Make yes, no, on or off a boolean where one is declared; whether that was it."""
    word = error["input"]
    if error["type"] != "bool_type" or str(word).lower() not in SWITCHES:
        return False
    *above, last = path_of(error["loc"], data)
    for step in above:
        data = data[step]
    data[last] = SWITCHES[word.lower()]
    return True


def _follows(complaint: Problem, unread: list[KeyPath]) -> bool:
    """Whether a value that could not be read, and was told, made this complaint."""
    size = len(complaint.path)
    return complaint.of != "key" and any(p[:size] == complaint.path for p in unread)


def _place(
    complaint: Problem, document: yaml_io.Document, origins: dict[KeyPath, str]
) -> ConfigError:
    path = complaint.path
    fault = ConfigError(complaint.message, hint=complaint.hint)
    above = [path[:size] for size in range(len(path), -1, -1)]
    if argument := next((origins[p] for p in above if p in origins), None):
        return replace(fault, argument=argument)
    if complaint.of == "block":
        below = [a for p, a in origins.items() if p[: len(path)] == path]
        note = f" (with argument '{below[0]}')" if below else ""
        fault = replace(fault, message=fault.message + note)
    # A key missing at the top level has no line to show.
    table = document.values if complaint.of == "value" else document.keys
    known = (table.get(p) or document.values.get(p) for p in above if p)
    return replace(fault, place=next(filter(None, known), None))


def _plain(recipe: Recipe) -> dict:
    data = recipe.model_dump(mode="json", exclude={"stages"})
    stages = [
        {s.kind: s.config.model_dump(mode="json", by_alias=True)} for s in recipe.stages
    ]
    return {**data, "stages": stages}
