"""The runs of a sweep: overrides with several values, and lists of overrides."""

import hashlib
import re
import shlex
from itertools import product

from ..errors import UserError

MAX_RUNS = 10_000
# Of a folder's name: a longer one ends with a hash.
NAME_CHARACTERS, HASH_CHARACTERS = 100, 8
OPENING, CLOSING = "[{", "]}"
# Names as they are: letters, digits and what is safe in a path.
UNSAFE = re.compile(r"[^\w.+,=-]")

# The overrides of a run: value by key, as text.
Values = dict[str, str]


def expand(arguments: list[str], lines: list[str]) -> list[Values]:
    """The overrides of every run, without repetitions.

    Args:
        arguments: `key=value,value,...`; every combination of their values is a run.
        lines: overrides of one run each, separated by spaces as in a shell. All
            combinations run with every line.

    Raises:
        UserError: an argument is no override, is repeated, or sets the run directory.
    """
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        key, text = _parts(argument)
        if key in axes:
            raise UserError(f"{key} is given twice", hint=f"{key}=value,value,...")
        axes[key] = _split(text)
    count = len(lines) or 1
    for values in axes.values():
        count *= len(values)
    if count > MAX_RUNS:
        raise UserError(f"this sweep has {count:,} runs; the limit is {MAX_RUNS:,}")
    grid = [dict(zip(axes, row, strict=True)) for row in product(*axes.values())]
    starts = [dict(map(_parts, _words(line))) for line in lines] or [{}]
    runs = [start | values for start in starts for values in grid]
    return [*{tuple(run.items()): run for run in runs}.values()]


def read_lines(text: str) -> list[str]:
    """The lines of a list that have overrides; # begins a comment."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def folder_name(values: Values) -> str:
    """The name of the folder of a run, the same in every sweep with these values."""
    text = "_".join(f"{key}={value}" for key, value in values.items()) or "recipe"
    name = UNSAFE.sub("-", text.removeprefix("stages.").replace("_stages.", "_"))
    name = name[:NAME_CHARACTERS]
    if text.replace("stages.", "") == name:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{name}-{digest[:HASH_CHARACTERS]}"


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UserError(f"a line of the list is not valid: {error}: {line}") from error


def _parts(argument: str) -> tuple[str, str]:
    key, equals, text = argument.partition("=")
    if not equals or not key:
        raise UserError(
            f"'{argument}' is not of the form key=value",
            hint="stages.train.learning_rate=1e-4,3e-4 seed=0,1,2",
        )
    if key == "output":
        raise UserError(
            "every run of a sweep has its own folder",
            place=argument,
            hint="--output FOLDER sets the folder of the sweep",
        )
    return key, text


def _split(text: str) -> list[str]:
    """The values between commas that are not in brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth <= 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]
