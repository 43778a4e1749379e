"""Values of a foreign file, and arguments, against the types that they must have."""

import json
import os
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import MAX_VALUE, UserError, shorten
from .errors import KeyPath

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "sequence_str": "a list",
    "mapping_type": "a block of keys",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
    "path_type": "a path",
    "callable_type": "a function",
}
LIMITS = {
    "greater_than": "must be more than {gt}, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "less_than": "must be less than {lt}, got {got}",
    "less_than_equal": "must be at most {le}, got {got}",
    "too_short": "needs at least one entry",
    "too_long": "has {actual_length} entries, at most {max_length} are allowed",
    "string_too_long": "must have at most {max_length} characters",
}


# Of a file's name, in all common file systems; of a path, with room for our own files.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3500


class FileConfig(BaseModel):
    """Keys of another program's file: strict types, further keys are not read."""

    model_config = ConfigDict(
        frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def read(cls, data: Any, *, place: str) -> Self:
        """The values of a file.

        Raises:
            UserError: names the first key that is missing or wrong.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as invalid:
            error = invalid.errors(include_url=False)[0]
            path = path_of(error["loc"], data)
            if error["type"] == "missing":
                path = (*path, error["loc"][-1])
            key = ".".join(map(str, path))
            message = f"{key}: {describe(error)}".removeprefix(": ")
            raise UserError(shorten(message), place=place) from invalid
        except UnicodeEncodeError as error:
            raise UserError("a text is no Unicode", place=place) from error


def describe(error: dict) -> str:
    """What is wrong with a value, from one of pydantic's errors."""
    kind, context, got = error["type"], error.get("ctx", {}), shown(error["input"])
    if kind == "missing":
        return "this key is missing"
    if kind == "extra_forbidden":
        return "this key is unknown"
    if kind == "value_error":
        return str(context["error"])
    if kind in LIMITS:
        limits = {
            name: f"{value:,}" if isinstance(value, int) else f"{value:g}"
            for name, value in context.items()
            if isinstance(value, int | float)
        }
        return LIMITS[kind].format(**limits, got=got)
    if expected := EXPECTED.get(kind) or context.get("expected"):
        return f"expected {expected}, got {got}"
    return f"{error['msg'][0].lower()}{error['msg'][1:]}, got {got}"


def path_of(location: Iterable[str | int], data: Any) -> KeyPath:
    """The keys of a pydantic location that exist in `data`, without union tags."""
    path: list[str | int] = []
    for step in location:
        known = range(len(data)) if isinstance(data, list) else data
        if isinstance(known, dict | range) and step in known:
            data = data[step]
            path.append(step)
    return tuple(path)


def shown(value: Any) -> str:
    """A value as text for a message."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a block of keys"
    if isinstance(value, list | tuple):
        return "a list"
    # Python writes no number of more than 4300 digits.
    if isinstance(value, int) and value.bit_length() > 4096:
        return "a number of more than 1000 digits"
    if isinstance(value, str | int | float | date):
        return shorten(json.dumps(value, default=str), MAX_VALUE)
    return kind_name(value)


def kind_name(value: Any) -> str:
    """The type of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def require_path(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a path that no file can have."""
    path = Path(os.path.expanduser(path))
    if path.parts and path.parts[0].startswith("~"):
        raise ValueError(f"there is no user {path.parts[0].removeprefix('~')}")
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts):
        raise ValueError(f"a name in the path has over {MAX_NAME_BYTES} bytes")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(f"the path has more than {MAX_PATH_BYTES:,} bytes")
