"""Watchdog: a process that raises, ends, hangs or is cut off ends the run everywhere.

A collective that waits for such a process can block for ever, outside Python. So every
process has one more connection with rank 0. Both ends send a line every few seconds. A
thread does this: it speaks for a process that computes for minutes, and not for one
that is stopped or has no network. Rank 0 hears of all failures, and tells all others
the first one: how the run ends, and which process prints a message.
"""

import json
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from ..errors import FAILED, INTERRUPTED, Interrupted, UserError
from . import terminal
from .signals import exit_at_once

BEAT_SECONDS = 2.0
# A system call or a function in C that keeps Python's lock for longer is not known.
SILENCE_SECONDS = 30.0
# The main thread gets this time to notice that the run ends.
GRACE_SECONDS = 1.0
# Rank 0 answers a process that raises within this time, if it lives.
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 30.0
CONNECT_HINT = "allow TCP connections between the machines"
# The ring backend itself gives up after 31 s, on ranks that find nobody to connect to.
JOIN_SECONDS = 45
BEAT, BYE = b"beat", b"bye"
MAX_MESSAGE = 1 << 12
RESUMES = "the same command resumes the run, also with another number of processes"


# Ends its parent after some seconds, unless that ends or closes the pipe first.
ENDS_PARENT = """
(sleep $1; echo "$2" >&2; kill -KILL $PPID) &
read _
kill -KILL 0
"""


@contextmanager
def killed_after(seconds: int, message: str) -> Iterator[None]:
    """Kill this process, with a message, if this context is open for so long.

    Another process does it: MLX keeps Python's lock while it connects processes, so no
    thread of this one could run.
    """
    program = ["sh", "-c", ENDS_PARENT, "sh", str(seconds), message]
    with subprocess.Popen(program, stdin=subprocess.PIPE, start_new_session=True):
        yield


class End(NamedTuple):
    """How a run ends before its time.

    Attributes:
        code: the exit code of all processes.
        reporter: the rank that prints a message.
        failure: which process failed and how; empty if the reporter has its own error.
    """

    code: int
    reporter: int
    failure: str = ""

    def error(self, rank: int) -> Exception:
        """The error that a process raises; only that of the reporter has a message."""
        if self.code == INTERRUPTED:
            return Interrupted()
        if not self.failure or rank != self.reporter:
            return UserError("", code=self.code)
        text = f"{self.failure}; the others end too"
        return UserError(text, hint=RESUMES, code=self.code)


class Watchdog:
    """Watches the other processes from a thread.

    Args:
        rank: of this process.
        peers: connections by rank: rank 0 has one with each process, the others have
            one with rank 0.

    Attributes:
        end: how the run ends; None while all are well.
    """

    def __init__(self, rank: int, peers: dict[int, Connection]):
        self.rank = rank
        self.end: End | None = None
        self._peers = peers
        self._last_seen = dict.fromkeys(peers, time.monotonic())
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._run_ends, self._main_ends = threading.Event(), threading.Event()
        self._is_alone = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait_for_end(self, seconds: float) -> End | None:
        """How the run ends; waits for it, because a backend may notice it first."""
        self._run_ends.wait(seconds)
        return self.end

    def main_raised(self, code: int) -> End:
        """End the other processes, because the main thread ends with an error.

        Returns:
            How the run ends: with this error, or an earlier one of another process.
        """
        self._main_ends.set()
        self.tell(code)
        end = self.wait_for_end(ANSWER_SECONDS) or End(code, self.rank)
        if end == End(code, self.rank):
            # Those that wait for this one in a collective end without MLX's message.
            self._is_alone.wait(GRACE_SECONDS + BEAT_SECONDS)
        return end

    def tell(self, code: int) -> None:
        """Tell the others that this process ends with an exit code."""
        end = End(code, self.rank)
        if self.rank == 0:
            self._decide(end)
        else:
            self._send(json.dumps(end).encode())

    def close(self) -> None:
        """Say that this process ends as it should, and watch no longer."""
        self._main_ends.set()
        self._closed.set()
        self._thread.join()
        self._send(BYE)
        for connection in self._peers.values():
            connection.close()

    def _watch(self) -> None:
        next_beat = time.monotonic()
        while not self._closed.is_set():
            now = time.monotonic()
            if now >= next_beat:
                self._send(BEAT)
                next_beat = now + BEAT_SECONDS
            readable = wait([*self._peers.values()], min(BEAT_SECONDS, 0.2))
            for peer, connection in [*self._peers.items()]:
                if connection in readable:
                    self._read(peer)
                elif time.monotonic() - self._last_seen[peer] > SILENCE_SECONDS:
                    self._lose(peer, f"has been silent for {SILENCE_SECONDS:g} s")
            if not self._peers:
                self._is_alone.set()
            if self.end and not self._main_ends.wait(GRACE_SECONDS):
                # The main thread is in the middle of something.
                if self.end.failure and self.rank == self.end.reporter:
                    terminal.write_err(f"{self.end.error(self.rank)}\n")
                exit_at_once(self.end.code)

    def _send(self, message: bytes) -> None:
        for connection in [*self._peers.values()]:
            # A process that is gone is noticed when it is read from.
            with suppress(OSError):
                connection.send_bytes(message)

    def _read(self, peer: int) -> None:
        try:
            message = self._peers[peer].recv_bytes(MAX_MESSAGE)
        except (OSError, EOFError):
            self._lose(peer, "ended")
            return
        self._last_seen[peer] = time.monotonic()
        if message == BYE:
            self._peers.pop(peer).close()
        elif message != BEAT:
            self._decide(End(*json.loads(message)))

    def _lose(self, peer: int, how: str) -> None:
        self._peers.pop(peer).close()
        # Without rank 0, the next process has the word.
        self._decide(End(FAILED, min(self.rank, 1), f"process {peer} {how}"))

    def _decide(self, end: End) -> None:
        """The first failure is how the run ends; rank 0 tells the others."""
        with self._lock:
            if self.end:
                return
            self.end = end
        if self.rank == 0:
            self._send(json.dumps(end).encode())
        self._run_ends.set()


def start(rank: int, size: int, host: str, broadcast: Callable[[Any], Any]) -> Watchdog:
    """Connect this process with rank 0, and watch.

    Args:
        host: a name or address of rank 0's machine that all machines reach.
        broadcast: returns rank 0's value on all ranks.

    Raises:
        UserError: a process does not connect.
    """
    if rank == 0:
        with socket.create_server((host, 0)) as server:
            token = secrets.token_hex()
            broadcast([server.getsockname()[1], token])
            return Watchdog(0, _accept(server, token, size))
    port, token = broadcast(None)
    try:
        stream = socket.create_connection((host, port), CONNECT_SECONDS)
        stream.settimeout(None)
        connection = Connection(stream.detach())
        connection.send_bytes(f"{token} {rank}".encode())
    except OSError as error:
        fault = f"process {rank} does not reach process 0 at {host}:{port}: {error}"
        raise UserError(fault, hint=CONNECT_HINT, code=FAILED) from error
    return Watchdog(rank, {0: connection})


def _accept(server: socket.socket, token: str, size: int) -> dict[int, Connection]:
    """The connections of all other ranks, each of which has sent the token."""
    names = {f"{token} {rank}".encode(): rank for rank in range(1, size)}
    peers: dict[int, Connection] = {}
    end = time.monotonic() + CONNECT_SECONDS
    while len(peers) < len(names) and (left := end - time.monotonic()) > 0:
        server.settimeout(left)
        # Others may connect too, and send anything or nothing.
        with suppress(OSError, EOFError):
            connection = Connection(server.accept()[0].detach())
            if connection.poll(left):
                rank = names.get(connection.recv_bytes(MAX_MESSAGE))
                if rank is not None:
                    peers[rank] = connection
    if missing := sorted({*names.values()} - peers.keys()):
        named = ", ".join(map(str, missing))
        fault = f"process {named} has not reached process 0 in {CONNECT_SECONDS:g} s"
        raise UserError(fault, hint=CONNECT_HINT, code=FAILED)
    return peers
