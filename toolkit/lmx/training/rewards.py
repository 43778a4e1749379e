"""Reward functions: numbers for sampled completions.

The functions of Python files run in a process of their own. A file may exit, hold the
interpreter for ever, print or crash. None of that reaches the run: it sends a line of
JSON over a socket and gets one back, with the random token of the call, in limited
time. Nothing is unpickled. What the functions print is discarded.
"""

import json
import numbers
import os
import secrets
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from ..config.text_files import require_regular
from ..data.answer_filters import FILTERS
from ..errors import FAILED, UserError
from ..files.hashes import hash_file

# Seconds that the import of a file may take, or reward_timeout if that is longer.
LOAD_SECONDS = 60.0
# Seconds in which a worker ends that is not needed, or has lost its run.
END_SECONDS = 1.0
# Squares and sums of larger values are no float32 numbers.
MAX_REWARD = 1e9
# Characters of a value or an error in a message; bytes of an answer with it.
MAX_SHOWN, MAX_ANSWER = 100, 4096
# A variable in the environment of a worker and of all that it starts.
MARK = "LMX_REWARD_WORKER"


EXACT_MATCH = "exact_match"
# The answer filters of the rewards that need no Python file.
MATCHES = {EXACT_MATCH: FILTERS["none"]} | {
    f"{EXACT_MATCH}:{name}": answer_filter for name, answer_filter in FILTERS.items()
}


class RewardError(Exception):
    """What a reward function or its file did wrong, such as "took longer than 5 s"."""


class RewardWorker:
    """Calls functions of Python files in a process, which starts when it is needed.

    The process ends with this object, whose end of the socket it reads, and with a call
    that takes too long. The next call starts another one.

    Args:
        timeout: seconds that a call may take.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._process: subprocess.Popen | None = None

    def load(self, path: Path, name: str) -> None:
        """Import the file of a function, if this was not done. Raises as `call`."""
        if self._process is None:
            self._start()
        self._exchange(max(self.timeout, LOAD_SECONDS), str(path), name)

    def call(self, path: Path, name: str, **arguments: str) -> float:
        """The number that a function of a file returns.

        Raises:
            RewardError: it fails, takes too long, or returns anything else.
        """
        if self._process is None:
            self.load(path, name)
        return self._exchange(self.timeout, str(path), name, arguments)

    def close(self) -> int | None:
        """End the process and what it has started; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _kill_marked(self._mark)
        return process.wait()

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._mark = secrets.token_hex()
        paths = [*map(str, sys.path)]
        program = f"import sys; sys.path[:] = {paths}; from {__name__} import serve"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{program}; serve()"],
                env=os.environ | {MARK: self._mark},
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is for the run, and what a function starts ends with it.
                start_new_session=True,
            )

    def _exchange(self, seconds: float, *request: str | dict) -> float | None:
        token, line = secrets.token_hex(), b""
        try:
            self._channel.settimeout(seconds)
            with suppress(ConnectionError), self._channel.makefile("rb") as replies:
                text = json.dumps([token, seconds, *request])
                self._channel.sendall(text.encode() + b"\n")
                line = replies.readline(MAX_ANSWER)
        except TimeoutError:
            raise RewardError(f"took longer than {seconds:g} s") from None
        finally:
            if not (is_answer := line.startswith(token.encode())):
                # The next call must not read the answer to this one.
                self._process.kill()
                code = self.close()
        if not line:
            raise RewardError(f"ended its process with exit code {code}")
        answer: object = ()
        with suppress(ValueError, RecursionError):
            answer = json.loads(line[len(token) :] if is_answer else "[]")
        if isinstance(answer, str):
            raise RewardError(answer)
        if not isinstance(answer, float if request[2:] else type(None)):
            raise RewardError("has changed the answer of its process")
        return answer


def serve() -> None:
    """Answer a `RewardWorker` until it closes its end of the socket."""
    channel, process, files = socket.socket(fileno=os.dup(0)), os.getpid(), {}
    mark = os.environ[MARK]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    # A process of a pool neither answers nor holds the socket open.
    os.register_at_fork(after_in_child=partial(os.dup2, null, channel.fileno()))
    for line in channel.makefile():
        token, seconds, *request = json.loads(line)
        # The kernel ends a hung process whose run was killed.
        _limit(seconds + END_SECONDS)
        reply = f"{token} {json.dumps(_answer(files, *request))}\n"
        if os.getpid() != process:
            # A function has forked, and its child has returned, too.
            os._exit(0)
        _limit(0)
        channel.sendall(reply.encode())
    _limit(END_SECONDS)
    _kill_marked(mark)


def _kill_marked(mark: str) -> None:
    """Kill what a worker has started, in whatever session; only Linux lists it."""
    killed, count = {os.getpid()}, 0
    while count < len(killed):
        count = len(killed)
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pid = int(file.parent.name)
                if pid not in killed and mark.encode() in file.read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)


def _limit(seconds: float) -> None:
    """End this process in `seconds`, whatever it does then; 0 = never."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(
    files: dict[str, dict], file: str, name: str, arguments: dict | None = None
) -> float | str | None:
    """The value of a call, None without arguments, or text: what went wrong."""
    try:
        if file not in files:
            files[file] = _import(file, len(files))
        function = files[file].get(name)
        if not callable(function):
            return f"has no function {name}"
        if arguments is None:
            return None
        value = function(**arguments)
        is_number = isinstance(value, numbers.Real) and abs(value) <= MAX_REWARD
        if is_number and abs(value := float(value)) <= MAX_REWARD:
            return value
    except BaseException as error:
        places = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in places if frame.f_code.co_filename == file]
        where = f" (line {lines[-1]})" if lines else ""
        return f"failed with {_shown('{0.__class__.__name__}: {0}', error)}{where}"
    shown, limits = _shown("{!r}", value), f"-{MAX_REWARD:g} to {MAX_REWARD:g}"
    return f"returned {shown}, not a number from {limits}"


def _import(file: str, number: int) -> dict:
    """The names of a file, a module that its neighbours and pickle can find.

    Args:
        number: of files before it. Their folders come first, because a process that a
            pool spawns imports their modules by name.
    """
    path = Path(file)
    sys.path.insert(number, str(path.parent))
    name = path.stem
    while name in sys.modules:
        name += "_"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = file
    # Not by an import, which may run the bytecode of another version.
    exec(compile(path.read_bytes(), file, "exec"), vars(module))
    return vars(module)


def _shown(template: str, value: object) -> str:
    """A text about an object of foreign code, in limited length."""
    try:
        return template.format(value)[:MAX_SHOWN].encode(errors="replace").decode()
    except BaseException:
        return "something without a text"


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
            hint=f"read {file}, then run with --allow-python",
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
