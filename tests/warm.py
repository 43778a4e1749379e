"""Processes that start with the modules of a run already imported.

Imports take most of the time of a short run. A server imports the modules once and
forks for every program. The fork has a separate process id, signals, exit status and
streams. A fork lacks the threads of its parent, but MLX has none before it computes.
Where forking is not safe (macOS), every program starts in a new interpreter.
"""

import atexit
import fcntl
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

import fusion

TESTS = Path(__file__).parent
# In the order in which a run imports them.
IMPORTED = (
    "lmx.cli.main",
    "lmx.config.loader",
    "lmx.pipeline.estimate",
    "lmx.pipeline.resources",
    "lmx.pipeline.runner",
    "lmx.pipeline.train.run",
    "lmx.pipeline.evaluate.evaluator",
    "lmx.pipeline.evaluate.metrics",
    "lmx.quantization.mixed_precision.search",
    "lmx.quantization.ptq.sequential",
    "lmx.cli.generate",
    "mlx_lm",
    "mlx_lm.models.llama",
    "numpy.ma",
    "numpy.random",
    "transformers.models.llama.configuration_llama",
    "transformers.video_utils",
)
FORKS = sys.platform == "linux"
NUMBER = struct.Struct("i")


class Process:
    """A running or ended Python program, with the interface of subprocess.Popen."""

    def __init__(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str = "",
        server: int = 0,
    ):
        self.program = program
        self.returncode: int | None = None
        # Files, because pipes without a reader fill up.
        self._streams = [_file() for _ in range(3)]
        self._streams[0].write(stdin)
        self._streams[0].seek(0)
        job = {
            "program": program,
            "arguments": arguments,
            "environment": environment(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "fuses": fusion.is_on,
        }
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address_of(server))
        socket.send_fds(self._connection, [b"."], [s.fileno() for s in self._streams])
        self._connection.sendall(json.dumps(job).encode() + b"\n")
        self.pid = self._receive()

    def _receive(self) -> int:
        data = self._connection.recv(NUMBER.size)
        if not data:
            raise RuntimeError("no process was started, see the output of the server")
        return NUMBER.unpack(data)[0]

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.program, timeout)
            self.returncode = self._receive()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def result(self, timeout: float) -> subprocess.CompletedProcess:
        """Wait for the result; the process is killed after the timeout."""
        try:
            self.wait(timeout)
        finally:
            self.kill()
        data = []
        for stream in self._streams:
            stream.seek(0)
            data.append(stream.read())
            stream.close()
        return subprocess.CompletedProcess(self.program, self.returncode, *data[1:])


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+")


def run(program: str, *arguments: str, timeout: float = 60, **settings):
    """Run to the end, like subprocess.run."""
    return Process(program, *arguments, **settings).result(timeout)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with the test modules on the path and without warnings."""
    paths = [str(TESTS / part) for part in ("", "training", "pipeline", "quantization")]
    paths += filter(None, [variables.get("PYTHONPATH")])
    more = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    return dict(variables) | more


@cache
def address_of(server: int) -> str:
    """The socket of a server, which ends with the process that started it.

    Forks of one server have the same hash seed; those of another server do not.
    """
    address = str(Path(tempfile.mkdtemp(prefix="lmx-warm-")) / "socket")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    names = IMPORTED if FORKS else ()
    command = [sys.executable, __file__, str(listener.fileno()), *names]
    running = subprocess.Popen(
        command,
        env=environment(os.environ),
        pass_fds=[listener.fileno()],
        # The pipe closes when this process ends, in any case.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    # The wait includes the server in the resource usage of the tests.
    atexit.register(running.communicate)
    return address


@cache
def warm_up(count: int) -> None:
    """Return when so many servers have imported their modules.

    On a busy machine this takes longer than a rank waits for its neighbour, 31 s.
    """
    for server in range(count):
        address_of(server)
    for server in range(count if FORKS else 0):
        run("", server=server, timeout=300)


def serve() -> str:
    """Fork for every request; only forks return, with their program."""
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
            return handle(line)
        running.add(pid)
        line.close()


def handle(line: socket.socket) -> str:
    """Start a program and send its exit status; its process returns the program."""
    _, streams, _, _ = socket.recv_fds(line, 1, 3)
    with line.makefile() as lines:
        job = json.loads(lines.readline())
    if not FORKS:
        pid = spawn(job, streams)
    elif (pid := os.fork()) == 0:
        line.close()
        set_up(job, streams)
        return job["program"]
    line.sendall(NUMBER.pack(pid))
    _, status = os.waitpid(pid, 0)
    line.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def spawn(job: dict, streams: list[int]) -> int:
    command = [sys.executable, "-c", job["program"], *job["arguments"]]
    names = ("stdin", "stdout", "stderr")
    pipes = dict(zip(names, streams, strict=True))
    settings = {"env": job["environment"], "cwd": job["folder"]}
    return subprocess.Popen(command, **settings, **pipes).pid


def hasten() -> None:
    """Leave out what no test sees, for this process.

    No test turns the power off, so that no file need reach the disk before the next.
    The speed of the machine, from which times are estimated, is that of a small model.
    """
    from lmx.pipeline import work

    os.fsync = lambda handle: None
    vars(fcntl).pop("F_FULLFSYNC", None)
    work.CPU_PROBE = (2, 16, 64)


def set_up(job: dict, streams: list[int]) -> None:
    """Set up this process like `python -c program`."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv[:] = ["-c", *job["arguments"]]
    hasten()
    fusion.fuse(job["fuses"])


if __name__ == "__main__":
    exec(serve(), {"__name__": "__main__"})
