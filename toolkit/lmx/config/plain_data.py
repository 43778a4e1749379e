"""Recipe data from Python: dicts, lists and scalars as YAML has them."""

import os
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, KeyPath
from .validation import kind_name
from .yaml_io import MAX_DEPTH, TOO_DEEP, text_fault

SCALARS = (bool, int, float)


def plain_data(value: Any, path: KeyPath = ()) -> tuple[Any, list[ConfigError]]:
    """A copy of a value that YAML can hold, and the errors of what it cannot hold.

    Tuples become lists, paths text, and scalars of NumPy and MLX numbers. A value with
    an error becomes None.

    Args:
        path: the keys of the value in the recipe.
    """
    errors: list[ConfigError] = []
    return _plain(value, path, errors), errors


def _plain(value: Any, path: KeyPath, errors: list[ConfigError]) -> Any:
    if len(path) >= MAX_DEPTH:
        errors.append(ConfigError(TOO_DEEP, path=path))
        return None
    match value:
        case None:
            return None
        case str():
            if fault := text_fault(value):
                errors.append(ConfigError(fault, path=path))
            return str.__str__(value)
        case bool() | int() | float():
            return next(kind(value) for kind in SCALARS if isinstance(value, kind))
        case os.PathLike():
            return _plain(os.fspath(value), path, errors)
        case Mapping():
            return _block(value, path, errors)
        case list() | tuple():
            return [_plain(v, (*path, i), errors) for i, v in enumerate(value)]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item(), path, errors)
    message = f"expected text, a number, a list or a dict, got {_kind(value)}"
    errors.append(ConfigError(message, path=path))
    return None


def _block(value: Mapping, path: KeyPath, errors: list[ConfigError]) -> dict:
    block = {}
    for key, inner in value.items():
        if isinstance(key, str):
            block[str.__str__(key)] = _plain(inner, (*path, key), errors)
        else:
            message = f"a key must be text, got {_kind(key)}"
            errors.append(ConfigError(message, path=path))
    return block


def _kind(value: Any) -> str:
    hint = "; give it to lmx.train as loss or metrics" * callable(value)
    return f"{kind_name(value)}{hint}"
