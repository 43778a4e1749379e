"""Checks of the datasets that a recipe names, before any weight is read."""

from collections.abc import Mapping
from typing import Any

from ..config.errors import KeyPath
from ..config.messages import Problem, nearest
from ..data.builtin import BUILTINS, PREFIX
from ..data.dataset import RecordReader
from ..data.record_formats import COLUMNS, check_columns
from ..errors import UserError
from .stage import Find, Formats, is_missing, missing_source


def check_datasets(block: Any, find: Find) -> tuple[list[Problem], Formats]:
    """Problems of the sources of a raw data block, and their formats."""
    problems: list[Problem] = []
    formats: Formats = {"train": [], "valid": []}
    block = block if isinstance(block, dict) else {}
    columns = known_columns(block)
    try:
        check_columns(_columns(block))
    except UserError as error:
        problems.append(Problem(("data", "columns"), error.message, error.hint))
    for split, names in formats.items():
        for path, source in named_sources(("data", split), block.get(split)):
            problem, name = check_source(path, source, split, find, columns)
            problems += [problem] if problem else []
            names.append(name)
    return problems, formats


def named_sources(path: KeyPath, value: Any) -> list[tuple[KeyPath, str]]:
    """The places and names of the sources in a raw value: a name, or a list."""
    is_list = isinstance(value, list)
    listed = [((*path, i), v) for i, v in enumerate(value)] if is_list else []
    return [(p, name) for p, name in listed or [(path, value)] if isinstance(name, str)]


def check_source(
    path: KeyPath, source: str, split: str, find: Find, columns: Mapping[str, str]
) -> tuple[Problem | None, str | None]:
    """The problem of a source, and its format; None = none, or not known.

    The first records of a local source are read. A dataset on the Hub is read when a
    stage needs it.

    Args:
        columns: as for `RecordReader`.
    """
    if source.startswith(PREFIX):
        if (name := source.removeprefix(PREFIX)) in BUILTINS:
            return None, "text"
        hint = nearest(name, BUILTINS)
        return Problem(path, f"unknown built-in data '{name}'", hint), None
    if is_missing(source, find):
        return missing_source(path, source, find), None
    if (place := find(source)) is None:
        return None, None
    try:
        return None, RecordReader(str(place), split=split, columns=columns).format
    except UserError as error:
        message = f"{error.place or place}: {error.message}"
        return Problem(path, message, error.hint), None


def known_columns(block: dict) -> dict[str, str]:
    """The columns of a raw data block without those that no format has."""
    return {name: key for name, key in _columns(block).items() if name in COLUMNS}


def _columns(block: dict) -> dict[str, str]:
    columns = block.get("columns")
    items = columns.items() if isinstance(columns, dict) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, str)}
