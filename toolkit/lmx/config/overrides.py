"""Arguments `a.b=value`, merged into a recipe's data before it is validated."""

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
    """Set every argument's value in `data`, in place.

    `stages.train.steps` means the one stage of that kind, `stages.2.train.steps` the
    second; lists are counted from 1.

    Returns:
        The argument behind every path that was set, and the arguments' own faults.
    """
    origins: dict[KeyPath, str] = {}
    faults = []
    for argument in arguments:
        try:
            origins |= dict.fromkeys(_set(data, argument), argument)
        except _BadOverride as error:
            faults.append(ConfigError(str(error), hint=error.hint, argument=argument))
    return origins, faults


def _set(data: dict, argument: str) -> list[KeyPath]:
    """Set one argument's value; the paths it made or set."""
    key, equals, text = argument.partition("=")
    if not equals or not all(key.split(".")):
        raise _BadOverride("an argument after the recipe has the form key=value")
    document = read(text)
    if document.faults:
        raise _BadOverride(document.faults[0].message)
    block: Any = data
    path: KeyPath = ()
    made = []
    *steps, last = _expanded(key.split("."), data)
    for step in steps:
        step = _known(block, step, path)
        path = (*path, step)
        if isinstance(block, dict) and block.get(step) is None:
            block[step] = {}
            made.append(path)
        block = block[step]
    last = _known(block, last, path)
    block[last] = document.data
    return [*made, (*path, last)]


def _known(block: Any, step: str, path: KeyPath) -> str | int:
    """The step as a key of a block, or an index of a list."""
    here = ".".join(str(p + 1 if isinstance(p, int) else p) for p in path)
    if isinstance(block, dict):
        return step
    if not isinstance(block, list):
        raise _BadOverride(
            f"'{here}' is a value, not a block; set it whole: {here}={{...}}"
        )
    if not step.isdecimal() or not 1 <= int(step) <= len(block):
        raise _BadOverride(f"'{here}' has the entries 1 to {len(block)}, got '{step}'")
    return int(step) - 1


def _expanded(steps: list[str], data: dict) -> list[str]:
    """The steps, with the number of the one stage of a kind filled in."""
    stages = data.get("stages")
    if steps[0] != "stages" or len(steps) < 2 or not isinstance(stages, list):
        return steps
    kind = steps[1]
    if kind.isdecimal():
        return steps
    found = [n for n, s in enumerate(stages, 1) if isinstance(s, dict) and kind in s]
    if not found:
        kinds = {key for stage in stages if isinstance(stage, dict) for key in stage}
        hint = key_hint(kind, kinds)
        raise _BadOverride(f"this recipe has no stage '{kind}'", hint)
    if len(found) > 1:
        which = " or ".join(f"stages.{n}.{kind}" for n in found)
        raise _BadOverride(f"{len(found)} stages are '{kind}': say {which}")
    return ["stages", str(found[0]), *steps[1:]]
