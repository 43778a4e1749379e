"""Overrides `a.b=value`, merged into the recipe data before validation."""

from collections.abc import Sequence
from typing import Any

from .errors import ConfigError, KeyPath
from .key_hints import key_hint
from .yaml_io import read


class _BadOverride(Exception):
    """An argument that does not fit the recipe."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.hint = hint


def merge(
    data: dict, arguments: Sequence[str]
) -> tuple[dict[KeyPath, str], list[ConfigError]]:
    """Set the value of every argument in `data`, in place.

    `stages.train.steps` sets a key of the only train stage, `stages.2.train.steps` of
    the second stage. Lists count from 1.

    Returns:
        The argument by path of its value, and the errors of invalid arguments.
    """
    origins: dict[KeyPath, str] = {}
    errors = []
    for argument in arguments:
        try:
            origins |= dict.fromkeys(_set(data, argument), argument)
        except _BadOverride as error:
            errors.append(ConfigError(str(error), hint=error.hint, argument=argument))
    return origins, errors


def _set(data: dict, argument: str) -> list[KeyPath]:
    """Set the value of one argument; returns the paths of new blocks and the value."""
    key, equals, text = argument.partition("=")
    if not equals or not all(key.split(".")):
        raise _BadOverride("an argument after the recipe must have the form key=value")
    document = read(text)
    if document.errors:
        raise _BadOverride(document.errors[0].message)
    block: Any = data
    path: KeyPath = ()
    created = []
    *steps, last = _with_stage_number(key.split("."), data)
    for step in steps:
        step = _key_or_index(block, step, path)
        path = (*path, step)
        if isinstance(block, dict) and block.get(step) is None:
            block[step] = {}
            created.append(path)
        block = block[step]
    last = _key_or_index(block, last, path)
    block[last] = document.data
    return [*created, (*path, last)]


def _key_or_index(block: Any, step: str, path: KeyPath) -> str | int:
    """The step as the key of a block or the index of a list."""
    address = ".".join(str(p + 1 if isinstance(p, int) else p) for p in path)
    if isinstance(block, dict):
        return step
    if not isinstance(block, list):
        raise _BadOverride(
            f"'{address}' is a value, not a block; set all of it: {address}={{...}}"
        )
    if not step.isdecimal() or not 1 <= int(step) <= len(block):
        raise _BadOverride(
            f"'{address}' has the entries 1 to {len(block)}, got '{step}'"
        )
    return int(step) - 1


def _with_stage_number(steps: list[str], data: dict) -> list[str]:
    """The steps, with the number of the only stage of a kind inserted."""
    stages = data.get("stages")
    if steps[0] != "stages" or len(steps) < 2 or not isinstance(stages, list):
        return steps
    kind = steps[1]
    if kind.isdecimal():
        return steps
    numbers = [n for n, s in enumerate(stages, 1) if isinstance(s, dict) and kind in s]
    if not numbers:
        kinds = {key for stage in stages if isinstance(stage, dict) for key in stage}
        hint = key_hint(kind, kinds)
        raise _BadOverride(f"this recipe has no stage '{kind}'", hint)
    if len(numbers) > 1:
        which = " or ".join(f"stages.{n}.{kind}" for n in numbers)
        raise _BadOverride(f"{len(numbers)} stages are '{kind}': use {which}")
    return ["stages", str(numbers[0]), *steps[1:]]
