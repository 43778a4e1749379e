"""Loading of a recipe with overrides, from a file or from Python: a validated recipe,
or all its errors."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from . import bundled, yaml_io
from .errors import ConfigErrors, KeyPath, Problem
from .messages import explain
from .overrides import Override, merge, shown
from .redaction import redact, redact_values
from .schema import RecipeConfig
from .text_files import read_text
from .validation import kind_name, path_of

Check = Callable[[dict, Callable[[str], Path | None]], list[Problem]]

# A number in YAML 1.2, and text in YAML 1.1.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
# Far more than any recipe needs; PyYAML reads 1 MB per second.
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class LoadedRecipe:
    """A validated recipe and its source.

    Attributes:
        recipe: the values as given; `text`, `overrides` and `resolved` are redacted
            (`redaction.redact`).
        name: the stem of the file, which is the name of the run directory.
        path: the file; None = the recipe was given in Python.
        source: the content of the file, or YAML of the data with its overrides.
        arguments: the overrides as arguments of the command line.
        root: second folder for relative paths, after the working directory.
        data: the data as given, with the overrides.
    """

    recipe: RecipeConfig
    name: str
    path: Path | None
    source: str
    arguments: tuple[str, ...]
    root: Path
    data: dict

    @cached_property
    def text(self) -> str:
        """The source."""
        return redact(self.source)

    @cached_property
    def overrides(self) -> tuple[str, ...]:
        """The arguments."""
        return tuple(map(redact, self.arguments))

    @cached_property
    def resolved(self) -> str:
        """YAML with all values, which loads to the same recipe."""
        return yaml_io.write(redact_values(self.recipe.values()))

    @cached_property
    def secrets(self) -> tuple[str, ...]:
        """Where a token or a password was redacted, such as "line 3"."""
        lines = enumerate(self.source.split("\n"), 1)
        places = [f"line {number}" for number, line in lines if redact(line) != line]
        # The source of a recipe from Python has the overrides, too.
        given = self.arguments if self.path else ()
        keys = (a.partition("=")[0] for a in given if redact(a) != a)
        return (*places, *(f"the argument {key}" for key in keys))

    def find(self, relative: str) -> Path | None:
        """An existing path, from the working directory or else from the root."""
        return find(relative, self.root)


def load_recipe(
    path: str | Path,
    overrides: Sequence[Override] = (),
    check: Check | None = None,
    text: str | None = None,
) -> LoadedRecipe:
    """Read a recipe, apply overrides and validate it. Reads no weights.

    Args:
        check: returns further problems of the raw recipe data, given a function that
            finds files; None = validate against the schema only.
        text: the content of the file; None = read it.

    Raises:
        ConfigErrors: all errors of the file and the arguments.
        UserError: the file cannot be read.
    """
    path = Path(path)
    if text is None:
        text = read_text(path, "recipe", max_bytes=MAX_BYTES)
    document = yaml_io.read(text)
    if not isinstance(document.data, dict):
        empty = Problem((), "the recipe is empty", "`lmx-train --list` shows examples")
        no_block = "a recipe must be a block of `key: value` lines"
        start = Problem((), no_block, place=yaml_io.SourcePosition(1, 1))
        fault = empty if document.data is None else start
        raise ConfigErrors(path, text, document.errors or [fault])
    return _load(document, overrides, check, path.stem, path, text, root_of(path))


def load_recipe_data(
    data: Mapping[str, Any],
    overrides: Sequence[Override] = (),
    check: Check | None = None,
    *,
    name: str,
    root: Path,
) -> LoadedRecipe:
    """`load_recipe` of data from Python; the place of an error is its key.

    Args:
        name: of the run directory.
        root: second folder for relative paths, after the working directory.

    Raises:
        ConfigErrors: all errors of the data and the overrides.
    """
    plain, errors = plain_data(data)
    if errors:
        raise ConfigErrors(None, "", errors)
    # Written and read, so that the same recipe in a file cannot differ from it.
    document = yaml_io.read(yaml_io.write(plain))
    return _load(document, overrides, check, name, None, "", root)


def _load(
    document: yaml_io.Document,
    overrides: Sequence[Override],
    check: Check | None,
    name: str,
    path: Path | None,
    text: str,
    root: Path,
) -> LoadedRecipe:
    """The recipe of a document, whose data gets the overrides."""
    data, arguments = document.data, tuple(map(shown, overrides))
    origins, errors = merge(data, overrides)
    recipe, problems = _validate(data)
    if check:
        problems += check(data, lambda source: find(source, root))
    errors += document.errors
    for problem in problems:
        above = problem.path
        # A value that has its own error is the cause of what is wrong above it.
        follows = any(path[: len(above)] == above for path in document.invalid)
        if problem.of == "key" or not follows:
            errors.append(_locate(problem, document, origins))
    if errors:
        raise ConfigErrors(path, text, errors)
    source = text if path else yaml_io.write(data)
    return LoadedRecipe(recipe, name, path, source, arguments, root, data)


def plain_data(value: Any, path: KeyPath = ()) -> tuple[Any, list[Problem]]:
    """A copy of a value that YAML can hold, and the errors of what it cannot hold.

    Tuples become lists, paths text, and scalars of NumPy and MLX numbers. A value with
    an error becomes None.

    Args:
        path: the keys of the value in the recipe.
    """
    errors: list[Problem] = []

    def plain(value: Any, path: KeyPath) -> Any:
        if len(path) >= yaml_io.MAX_DEPTH:
            fault = yaml_io.TOO_DEEP
        elif isinstance(value, str):
            if not (fault := yaml_io.text_fault(value)):
                return str.__str__(value)
        elif value is None or isinstance(value, bool | int | float):
            # Without subclasses, such as those of an enumeration.
            kinds = (kind for kind in (bool, int, float) if isinstance(value, kind))
            return value if value is None else next(kinds)(value)
        elif isinstance(value, os.PathLike):
            return plain(os.fspath(value), path)
        elif isinstance(value, Mapping):
            for key in (key for key in value if not isinstance(key, str)):
                fault = f"a key must be text, got {kind_name(key)}"
                errors.append(Problem(path, fault))
            items = [(k, inner) for k, inner in value.items() if isinstance(k, str)]
            return {str.__str__(k): plain(inner, (*path, k)) for k, inner in items}
        elif isinstance(value, list | tuple):
            return [plain(inner, (*path, i)) for i, inner in enumerate(value)]
        elif getattr(value, "shape", None) == () and hasattr(value, "item"):
            return plain(value.item(), path)
        else:
            hint = "; give it to lmx.train as loss or metrics" * callable(value)
            what = f"{kind_name(value)}{hint}"
            fault = f"expected text, a number, a list or a dict, got {what}"
        errors.append(Problem(path, fault))
        return None

    return plain(value, path), errors


def find(relative: str, root: Path) -> Path | None:
    """An existing path: absolute, from the working directory, or from `root`.

    Files in data/ that exist in neither folder are those that come with lmx.
    """
    path = Path(os.path.expanduser(relative))  # unlike pathlib's, it never raises
    existing = (c for c in (path, root / path) if os.path.exists(c))
    return next(existing, None) or bundled.bundled_data(path)


def root_of(recipe: Path) -> Path:
    """The parent of the folder `recipes` with the recipe, else the recipe's folder."""
    parents = recipe.resolve().parents
    return next((p.parent for p in parents if p.name == "recipes"), parents[0])


def _validate(data: dict) -> tuple[RecipeConfig | None, list[Problem]]:
    try:
        return RecipeConfig.model_validate(data), []
    except ValidationError as invalid:
        errors = invalid.errors(include_url=False)
    # The schema has a boolean where yes, no, on or off is given, or a number where
    # other readers of YAML take 2e-3 for text.
    meant = [(e, _meant(e["type"], e["input"])) for e in errors]
    meant = [(error, value) for error, value in meant if value is not None]
    for error, value in meant:
        *above, last = path_of(error["loc"], data)
        block = data
        for step in above:
            block = block[step]
        block[last] = value
    if meant:
        return _validate(data)
    return None, [explain(error, data) for error in errors]


def _meant(fault: str, value: Any) -> bool | float | None:
    """The switch or the number that text stands for; None if it is neither."""
    if fault == "bool_type":
        return yaml_io.SWITCHES.get(str(value).lower())
    is_number = fault == "float_type" and EXPONENT.fullmatch(str(value))
    return float(value) if is_number else None


def _locate(
    problem: Problem, document: yaml_io.Document, origins: dict[KeyPath, str]
) -> Problem:
    """The problem with the argument or the position in the file that causes it."""
    path = problem.path
    prefixes = [path[:size] for size in range(len(path), -1, -1)]
    if argument := next((origins[p] for p in prefixes if p in origins), None):
        return replace(problem, argument=argument)
    message = problem.message
    if problem.of == "block":
        inside = [a for p, a in origins.items() if p[: len(path)] == path]
        message += f" (with argument '{inside[0]}')" if inside else ""
    # A missing top-level key has no line in the file.
    table = document.values if problem.of == "value" else document.keys
    positions = (table.get(p) or document.values.get(p) for p in prefixes if p)
    place = next(filter(None, positions), None)
    return replace(problem, message=message, place=place)
