"""Reward functions: numbers for sampled completions."""

import math
import numbers
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from ..config.text_files import require_regular
from ..data.answer_filters import FILTERS
from ..errors import FAILED, UserError
from ..run.fs import hash_file

EXACT_MATCH = "exact_match"
# The answer filters of the rewards that need no Python file.
MATCHES = {EXACT_MATCH: FILTERS["none"]} | {
    f"{EXACT_MATCH}:{name}": answer_filter for name, answer_filter in FILTERS.items()
}
# Characters of a completion or an error in a message.
MAX_SHOWN = 200


@dataclass(frozen=True)
class RewardSample:
    """What a reward function sees, as keyword arguments.

    Attributes:
        prompt: its text, with the chat template.
        completion: without special tokens.
        answer: the completion of the example.
        where: the location of the example, for messages.
    """

    prompt: str
    completion: str
    answer: str
    where: str


@dataclass(frozen=True)
class Reward:
    """A reward function.

    Attributes:
        name: as in the recipe.
        function: from the keywords prompt, completion and answer to a number.
        timeout: seconds that a call may take; None = no limit.
        digest: changes with the function's file.
    """

    name: str
    function: Callable[..., Any]
    timeout: float | None = None
    digest: str = ""

    def __call__(self, sample: RewardSample) -> float:
        """The reward of a completion.

        Raises:
            UserError: the function fails, takes too long, or returns no finite number
                (exit code 1).
        """
        arguments = {
            "prompt": sample.prompt,
            "completion": sample.completion,
            "answer": sample.answer,
        }
        value = self._call(arguments, sample)
        is_number = isinstance(value, numbers.Real)
        if not is_number or not math.isfinite(value):
            raise self._error(f"returned {value!r:.{MAX_SHOWN}}, not a number", sample)
        return float(value)

    def _call(self, arguments: dict[str, str], sample: RewardSample) -> Any:
        if self.timeout is None:
            return self.function(**arguments)
        outcome: list[Any] = []

        def call() -> None:
            try:
                outcome.append((self.function(**arguments), None))
            except BaseException as error:
                outcome.append((None, error))

        # A function that never returns keeps its thread; the run ends without it.
        thread = Thread(target=call, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if not outcome:
            raise self._error(f"took longer than {self.timeout:g} s", sample)
        value, error = outcome[0]
        if error is not None:
            text = f"{type(error).__name__}: {error}"[:MAX_SHOWN]
            raise self._error(f"failed with {text}", sample) from error
        return value

    def _error(self, what: str, sample: RewardSample) -> UserError:
        return UserError(
            f"the reward {self.name} {what}, for the completion "
            f"{sample.completion[:MAX_SHOWN]!r}",
            place=sample.where,
            hint="correct the function; the same command goes on from the last "
            "checkpoint",
            code=FAILED,
        )


def resolve_rewards(
    names: Sequence[str],
    *,
    find: Callable[[str], Path | None],
    allow_python: bool,
    timeout: float,
) -> list[Reward]:
    """The reward functions of a recipe.

    Args:
        find: resolves a relative path of the recipe.
        allow_python: whether the user allows Python files.
        timeout: seconds that a function of a Python file may take.

    Raises:
        UserError: there is no such function, or Python files are not allowed.
    """
    return [
        _resolve(name, find=find, allow_python=allow_python, timeout=timeout)
        for name in names
    ]


def check_reward(name: str, find: Callable[[str], Path | None]) -> None:
    """Refuse a reward function that does not exist. No Python code runs.

    Raises:
        UserError: there is no such function or file.
    """
    place, file = f"rewards: {name}", name.rpartition(":")[0]
    if name in MATCHES:
        return
    if not file.endswith(".py"):
        raise UserError(
            f"there is no reward {name!r}",
            place=place,
            hint=f"use {', '.join(MATCHES)}, or FILE.py:FUNCTION",
        )
    if (path := find(file)) is None:
        raise UserError(f"there is no file {file}", place=place)
    require_regular(path)


def _resolve(
    name: str,
    *,
    find: Callable[[str], Path | None],
    allow_python: bool,
    timeout: float,
) -> Reward:
    check_reward(name, find)
    if name in MATCHES:
        return Reward(name, partial(exact_match, answer_filter=MATCHES[name]))
    place = f"rewards: {name}"
    file, _, function = name.rpartition(":")
    if not allow_python:
        raise UserError(
            "a recipe runs Python code only if you allow it",
            place=place,
            hint=f"read {file}, then add --allow-python to the command",
        )
    path = find(file)
    return Reward(name, _load(path, function, place), timeout, hash_file(path))


def _load(path: Path, name: str, place: str) -> Callable[..., Any]:
    try:
        function = runpy.run_path(str(path)).get(name)
    except Exception as error:
        raise UserError(
            f"{path} fails: {type(error).__name__}: {error}"[:MAX_SHOWN], place=place
        ) from error
    if not callable(function):
        raise UserError(f"{path} has no function {name}", place=place)
    return function


def exact_match(
    prompt: str,
    completion: str,
    answer: str,
    *,
    answer_filter: Callable[[str], object],
) -> float:
    """1 if the compared part of the completion equals that of the answer."""
    part = answer_filter(completion)
    return float(part is not None and part == answer_filter(answer))
