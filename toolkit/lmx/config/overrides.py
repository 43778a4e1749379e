"""Overrides `a.b=value`, merged into the recipe data before validation."""

import json
from collections.abc import Sequence
from typing import Any

from ..errors import UserError
from .errors import KeyPath, Problem, address
from .key_hints import key_hint
from .yaml_io import read

# The text `key=value`, whose value is YAML, or a key and a value.
Override = str | tuple[str, Any]


def shown(override: Override) -> str:
    """An override as an argument of the command line."""
    if isinstance(override, str):
        return override
    key, value = override
    is_bare = isinstance(value, str) and read(value).data == value
    text = value if is_bare else json.dumps(value, ensure_ascii=False)
    return f"{key}={text}"


def merge(
    data: dict, overrides: Sequence[Override]
) -> tuple[dict[KeyPath, str], list[Problem]]:
    """Set the value of every override in `data`, in place.

    `stages.train.steps` sets a key of the only train stage, `stages.2.train.steps` of
    the second stage. Lists count from 1.

    Returns:
        The override by path of its value, and the errors of invalid overrides.
    """
    origins: dict[KeyPath, str] = {}
    errors = []
    for override in overrides:
        argument = shown(override)
        try:
            origins |= dict.fromkeys(_set(data, override), argument)
        except UserError as error:
            errors.append(Problem((), error.message, error.hint, argument=argument))
    return origins, errors


def _set(data: dict, override: Override) -> list[KeyPath]:
    """Set one value; returns the paths of new blocks and of the value.

    Raises:
        UserError: the override does not fit the recipe.
    """
    if isinstance(override, str):
        key, equals, text = override.partition("=")
        document = read(text)
        value, errors = document.data, document.errors
    else:
        (key, value), equals, errors = override, "=", []
    if not (equals and all(key.split("."))):
        raise UserError("an argument after the recipe must have the form key=value")
    if errors:
        raise UserError(errors[0].message)
    block: Any = data
    path: KeyPath = ()
    created = []
    *steps, last = _with_stage_number(key.split("."), data.get("stages"))
    for step in steps:
        step = _key_or_index(block, step, path)
        path = (*path, step)
        if isinstance(block, dict) and block.get(step) is None:
            block[step] = {}
            created.append(path)
        block = block[step]
    last = _key_or_index(block, last, path)
    block[last] = value
    return [*created, (*path, last)]


def _key_or_index(block: Any, step: str, path: KeyPath) -> str | int:
    """The step as the key of a block or the index of a list."""
    above = address(path)
    if isinstance(block, dict):
        return step
    if not isinstance(block, list):
        raise UserError(
            f"'{above}' is a value, not a block; set all of it: {above}={{...}}"
        )
    # Python reads no number of more than 4,300 digits.
    if not step.isdecimal() or not 1 <= int(step[:9]) <= len(block):
        raise UserError(f"'{above}' has the entries 1 to {len(block)}, got '{step}'")
    return int(step) - 1


def _with_stage_number(steps: list[str], stages: Any) -> list[str]:
    """The steps, with the number of the only stage of a kind inserted."""
    if steps[0] != "stages" or len(steps) < 2 or not isinstance(stages, list):
        return steps
    kind = steps[1]
    entries = {n: [*s] for n, s in enumerate(stages, 1) if isinstance(s, dict)}
    if kind.isdecimal():
        keys = entries.get(int(kind[:9]), [])
        if len(keys) == 1 and len(steps) > 2 and steps[2] != keys[0]:
            # It would add a second kind to the stage.
            hint = f"its keys begin with stages.{int(kind)}.{keys[0]}"
            message = f"stage {int(kind)} is '{keys[0]}', not '{steps[2]}'"
            raise UserError(message, hint=hint)
        return steps
    numbers = [n for n, keys in entries.items() if kind in keys]
    if not numbers:
        hint = key_hint(kind, {key for keys in entries.values() for key in keys})
        raise UserError(f"this recipe has no stage '{kind}'", hint=hint)
    if len(numbers) > 1:
        which = " or ".join(f"stages.{n}.{kind}" for n in numbers)
        raise UserError(f"{len(numbers)} stages are '{kind}': use {which}")
    return ["stages", str(numbers[0]), *steps[1:]]
