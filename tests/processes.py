"""Starts a program in several processes connected in a ring, like mlx.launch."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
from lmx.interfaces import Communicator
from warm import Process, warm_up

# A process that waits for another one takes a core, so other work costs them much time.
SECONDS = 300
LISTENS_SECONDS = 0.5
# Of 127.0.0.1, in Linux's table of sockets.
LISTENING = "0100007F:{:04X} 00000000:0000 0A"
# The ring backend has no reduce-scatter, so an all-reduce replaces it.
SCATTER = """
import mlx.core as mx

def scatter(values, *, group=None):
    size = len(values) // group.size()
    first = group.rank() * size
    return mx.distributed.all_sum(values, group=group)[first : first + size]

mx.distributed.sum_scatter = scatter
"""

# Negative control: the second process does the share of the first one.
WRONG_SHARD = """
import os
from itertools import islice
from lmx.interfaces import Communicator

if os.environ["MLX_RANK"] == "1":
    Communicator.shard = lambda self, items: islice(items, 0, None, self.size)
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def hostfile(folder: Path, count: int = 2) -> Path:
    hosts = [[f"127.0.0.1:{port}"] for port in free_ports(count)]
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return path


def wait_for_listener(address: str, process: Process) -> None:
    """A rank that finds its neighbour listening need not retry a second later."""
    port = int(address.rpartition(":")[2])
    sockets, end = Path("/proc/net/tcp"), time.monotonic() + LISTENS_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if sockets.exists() and LISTENING.format(port) in sockets.read_text():
            return
        time.sleep(0.01)


def in_ring(
    program: str, *arguments: str, folder: Path, count: int = 2
) -> list[subprocess.CompletedProcess]:
    """Run a Python program in every process; returns the results by rank."""
    warm_up(count)
    hosts = hostfile(folder, count)
    settings = os.environ | {"MLX_HOSTFILE": str(hosts)}
    started = []
    for rank in range(count):
        environment = settings | {"MLX_RANK": str(rank)}
        process = Process(program, *arguments, env=environment, server=rank)
        started.append(process)
        if rank < count - 1:
            wait_for_listener(json.loads(hosts.read_text())[rank][0], process)
    try:
        return [process.result(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()


class InTurn(Communicator):
    """A rank of several that run one after the other in this process, rank 0 last.

    It is for work whose only collective is one `divide`. What others compute from it
    is wrong.

    Attributes:
        share_of: the rank whose share it does.
    """

    def __init__(self, rank: int, size: int, sent: dict[int, bytes], share_of: int):
        self.rank, self.size, self.sent, self.share_of = rank, size, sent, share_of

    def shard(self, items):
        return islice(items, self.share_of, None, self.size)

    def gather_bytes(self, data):
        self.sent[self.rank] = data
        return [self.sent.get(rank, data) for rank in range(self.size)]


def in_turn(work: Callable, size: int = 2, *, is_wrong: bool = False):
    """The result of rank 0 of a function of a process group.

    Args:
        is_wrong: all ranks do the first one's share, as a negative control.
    """
    sent: dict[int, bytes] = {}
    for rank in reversed(range(size)):
        result = work(InTurn(rank, size, sent, 0 if is_wrong else rank))
    return result


def cases_of(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Arrays that a process saved as `case|key`, by case and key."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, value in np.load(path).items():
        case, _, key = name.partition("|")
        cases.setdefault(case, {})[key] = value
    return cases
