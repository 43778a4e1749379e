"""Arguments of the public functions, checked against their annotations."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, ParamSpec, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    validate_call,
)

from ..config.messages import nearest
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
CONTAINERS = (dict, list, tuple)


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
    validated = validate_call(config=STRICT)(function)
    names = [
        name
        for parameter in signature(function).parameters.values()
        for name in _names(parameter)
    ]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return validated(*args, **kwargs)
        except ValidationError as invalid:
            if invalid.title != function.__qualname__:
                raise
            errors = invalid.errors(include_url=False)
            given = dict(zip(names, args, strict=False)) | kwargs
            message, hint = _explain(errors, names, given)
            place = f"lmx.{function.__name__.lstrip('_')}"
            raise UserError(message, place=place, hint=hint) from invalid

    return call


def _names(parameter: Parameter) -> list[str]:
    """The name of a parameter, or those of the keys of `**options`."""
    kinds = get_args(parameter.annotation)
    if parameter.kind is Parameter.VAR_KEYWORD and kinds:
        return list(kinds[0].__annotations__)
    return [parameter.name]


def _explain(
    errors: list[Any], names: list[str], given: dict[str, Any]
) -> tuple[str, str | None]:
    """The message for the first faulty argument, and a hint."""
    argument, kind = errors[0]["loc"][0], errors[0]["type"]
    name = names[argument] if isinstance(argument, int) else argument
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown option '{name}'", nearest(name, names)
    if kind.startswith("missing"):
        return f"{name} is missing", None
    if "argument" in kind:
        return f"{errors[0]['msg'].lower()}: {shown(given.get(name))}", None
    errors = [error for error in errors if error["loc"][0] == argument]
    paths = [path_of(error["loc"][1:], given[name]) for error in errors]
    # A type among several that fits outside has its error inside.
    deepest = max(paths, key=len)
    errors = [e for e, path in zip(errors, paths, strict=True) if path == deepest]
    place = ".".join(map(str, (name, *deepest)))
    value = errors[0]["input"]
    got = kind_name(value) if isinstance(value, CONTAINERS) else shown(value)
    kinds = [_kind(error) for error in errors]
    if "" in kinds:
        return f"{place}: {describe(errors[kinds.index('')])}", None
    return f"{place}: expected {' or '.join(dict.fromkeys(kinds))}, got {got}", None


def _kind(error: Any) -> str:
    """The type that an error expects; empty if it is about something else."""
    if error["type"] == "is_instance_of":
        name = error["ctx"]["class"]
        return CLASSES.get(name, f"an instance of lmx.{name}")
    return NAMES.get(error["type"], "")
