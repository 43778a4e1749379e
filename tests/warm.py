"""Processes that need not import what every run imports, which takes most of one.

A server imports it once, and every program runs in a copy of that process, with a
process id, signals, an exit status and streams of its own. A copy lacks the threads of
what is copied, but MLX has none before it computes. Where copying is not safe (macOS),
every program is started anew.
"""

import atexit
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
# In the order in which a run imports them.
IMPORTED = (
    "lmx.cli.main",
    "lmx.config.loader",
    "lmx.pipeline.estimate",
    "lmx.pipeline.resources",
    "lmx.pipeline.runner",
    "lmx.pipeline.train_run",
    "lmx.cli.generate",
    "mlx_lm",
    "mlx_lm.models.llama",
    "numpy.random",
)
COPIES = sys.platform == "linux"
NUMBER = struct.Struct("i")


class Process:
    """A Python program that is running, or did; as subprocess.Popen has it."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        said: str = "",
        server: int = 0,
    ):
        self.program = program
        self.returncode: int | None = None
        # Files, since pipes that nobody reads fill up.
        self._streams = [_file() for _ in range(3)]
        self._streams[0].write(said)
        self._streams[0].seek(0)
        job = {
            "program": program,
            "arguments": arguments,
            "environment": environment(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
        }
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address_of(server))
        socket.send_fds(self._line, [b"."], [s.fileno() for s in self._streams])
        self._line.sendall(json.dumps(job).encode() + b"\n")
        self.pid = self._hear()

    def _hear(self) -> int:
        told = self._line.recv(NUMBER.size)
        if not told:
            raise RuntimeError("no process was started, see what the server says")
        return NUMBER.unpack(told)[0]

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.program, timeout)
            self.returncode = self._hear()
            self._line.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def ended(self, timeout: float) -> subprocess.CompletedProcess:
        """What became of it; it is killed if that takes too long."""
        try:
            self.wait(timeout)
        finally:
            self.kill()
        told = []
        for stream in self._streams:
            stream.seek(0)
            told.append(stream.read())
            stream.close()
        return subprocess.CompletedProcess(self.program, self.returncode, *told[1:])


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def run(program: str, *arguments: str, timeout: float = 60, **settings):
    """Run to the end, as subprocess.run does."""
    return Process(program, *arguments, **settings).ended(timeout)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """With the tests' own modules, and without warnings among what programs say."""
    paths = [str(TESTS / part) for part in ("", "training", "pipeline")]
    paths += filter(None, [given.get("PYTHONPATH")])
    more = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    return dict(given) | more


@cache
def address_of(server: int) -> str:
    """Where a server listens; it ends with the process that started it.

    All copies of one order their sets alike; those of another do not.
    """
    address = str(Path(tempfile.mkdtemp(prefix="lmx-warm-")) / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    names = IMPORTED if COPIES else ()
    command = [sys.executable, __file__, str(listener.fileno()), *names]
    running = subprocess.Popen(
        command,
        env=environment(os.environ),
        pass_fds=[listener.fileno()],
        # Closed by the end of this process, however it ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    # Waited for, it counts in what the tests took.
    atexit.register(running.communicate)
    return address


def serve() -> str:
    """Copy this process for everyone who asks; only copies return, with a program."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    running: set[int] = set()
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if listener not in ready:
            os._exit(0)
        line, _ = listener.accept()
        if (pid := os.fork()) == 0:
            listener.close()
            return attend(line)
        running.add(pid)
        line.close()


def attend(line: socket.socket) -> str:
    """Start a program, and tell how it ended; what it is to run, in its process."""
    _, streams, _, _ = socket.recv_fds(line, 1, 3)
    with line.makefile() as lines:
        job = json.loads(lines.readline())
    if not COPIES:
        pid = started(job, streams)
    elif (pid := os.fork()) == 0:
        line.close()
        become(job, streams)
        return job["program"]
    line.sendall(NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    line.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def started(job: dict, streams: list[int]) -> int:
    command = [sys.executable, "-c", job["program"], *job["arguments"]]
    names = ("stdin", "stdout", "stderr")
    pipes = dict(zip(names, streams, strict=True))
    settings = {"env": job["environment"], "cwd": job["folder"]}
    return subprocess.Popen(command, **settings, **pipes).pid


def become(job: dict, streams: list[int]) -> None:
    """What `python -c program` is when its imports are done."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[:] = ["-c", *job["arguments"]]


if __name__ == "__main__":
    exec(serve(), {"__name__": "__main__"})
