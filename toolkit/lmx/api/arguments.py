"""Arguments of the public functions, checked against their annotations."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    validate_call,
)

from ..config.validation import (
    EXPECTED,
    describe,
    kind_name,
    path_of,
    require_path,
    shown,
)
from ..config.yaml_io import text_fault
from ..errors import UserError

P = ParamSpec("P")
R = TypeVar("R")
STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True, extra="forbid")
NAMES = EXPECTED | {"dict_type": "a dict"}
CLASSES = {"Sequence": "a list", "PathLike": "a path"}
# Flags of the command line that hints name, and that are keywords here.
FLAGS = ("--restart", "--ignore-limits", "--allow-python")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def _number(value: Any) -> Any:
    """A scalar of NumPy or MLX as Python's."""
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def _path(value: str | os.PathLike[str]) -> str | os.PathLike[str]:
    if fault := text_fault(os.fspath(value)):
        raise ValueError(fault)
    require_path(value)
    return value


Integer = Annotated[int, BeforeValidator(_number)]
# Of any class, such as that of a config library.
Keys = Annotated[Mapping[str, Any], Strict(False)]
PathLike = Annotated[str | os.PathLike[str], AfterValidator(_path)]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function with strict arguments.

    Raises (when called):
        UserError: an argument is unknown or missing, or has another type or range.
    """

    # The function itself runs outside of pydantic, which is no part of its tracebacks.
    @wraps(function)
    def given_arguments(*args: P.args, **kwargs: P.kwargs) -> Any:
        return args, kwargs

    validated = validate_call(config=STRICT)(given_arguments)
    names = list(signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            args, kwargs = validated(*args, **kwargs)
        except ValidationError as invalid:
            given = dict(zip(names, args, strict=False)) | kwargs
            message = _message(invalid.errors(include_url=False), names, given)
            place = f"lmx.{function.__name__.lstrip('_')}"
            raise UserError(message, place=place) from None
        try:
            return function(*args, **kwargs)
        except UserError as error:
            for flag in FLAGS:
                keyword = f"{flag[2:].replace('-', '_')}=True"
                error.hint = error.hint and error.hint.replace(flag, keyword)
            raise

    return call


def _message(errors: list[Any], names: list[str], given: dict[str, Any]) -> str:
    """What is wrong with the first faulty argument."""
    argument, kind = errors[0]["loc"][0], errors[0]["type"]
    name = names[argument] if isinstance(argument, int) else argument
    if kind in UNKNOWN:
        return f"unknown option '{name}'"
    if "argument" in kind:
        return f"{name}: {errors[0]['msg'].lower()}"
    errors = [error for error in errors if error["loc"][0] == argument]
    paths = [path_of(error["loc"][1:], given[name]) for error in errors]
    # A type among several that fits outside has its error inside.
    deepest = max(paths, key=len)
    errors = [e for e, path in zip(errors, paths, strict=True) if path == deepest]
    place = ".".join(map(str, (name, *deepest)))
    kinds = [NAMES.get(error["type"], "") for error in errors]
    for index, error in enumerate(errors):
        if error["type"] == "is_instance_of":
            cls = error["ctx"]["class"]
            kinds[index] = CLASSES.get(cls, f"an instance of lmx.{cls}")
        elif not kinds[index]:
            return f"{place}: {describe(error)}"
    value = errors[0]["input"]
    is_plain = not isinstance(value, dict | list | tuple)
    got = shown(value) if is_plain else kind_name(value)
    return f"{place}: expected {' or '.join(dict.fromkeys(kinds))}, got {got}"
