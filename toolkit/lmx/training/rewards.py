"""Reward functions: numbers for sampled completions."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..config.text_files import require_regular
from ..data.answer_filters import FILTERS
from ..errors import FAILED, UserError
from ..run.fs import hash_file
from .reward_worker import MAX_SHOWN, RewardError, RewardWorker

EXACT_MATCH = "exact_match"
# The answer filters of the rewards that need no Python file.
MATCHES = {EXACT_MATCH: FILTERS["none"]} | {
    f"{EXACT_MATCH}:{name}": answer_filter for name, answer_filter in FILTERS.items()
}


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
        digest: changes with the function's file.
    """

    name: str
    function: Callable[..., float]
    digest: str = ""

    def __call__(self, sample: RewardSample) -> float:
        """The reward of a completion.

        Raises:
            UserError: the function fails, takes too long, or returns no finite number
                (exit code 1).
        """
        try:
            return self.function(
                prompt=sample.prompt, completion=sample.completion, answer=sample.answer
            )
        except RewardError as error:
            raise UserError(
                f"the reward {self.name} {error}, for the completion "
                f"{sample.completion[:MAX_SHOWN]!r}",
                place=sample.where,
                hint="correct the function; the same command goes on from the last "
                "checkpoint",
                code=FAILED,
            ) from error


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


def resolve_reward(
    name: str, find: Callable[[str], Path | None], worker: RewardWorker | None
) -> Reward:
    """A reward function of a recipe.

    Args:
        find: resolves a relative path of the recipe.
        worker: runs Python files; None = the user does not allow them.

    Raises:
        UserError: there is no such function, or its file fails or is not allowed.
    """
    check_reward(name, find)
    if name in MATCHES:
        return Reward(name, partial(exact_match, answer_filter=MATCHES[name]))
    place = f"rewards: {name}"
    file, _, function = name.rpartition(":")
    if worker is None:
        raise UserError(
            "a recipe runs Python code only if you allow it",
            place=place,
            hint=f"read {file}, then add --allow-python to the command",
        )
    path = find(file).absolute()
    try:
        worker.load(path, function)
    except RewardError as error:
        raise UserError(f"{path} {error}", place=place) from error
    return Reward(name, partial(worker.call, path, function), hash_file(path))


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
