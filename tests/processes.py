"""Starts a program in several processes connected in a ring, as mlx.launch does."""

import json
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from warm import Process

SECONDS = 60
# A ring cannot sum into shares, so here that is done the long way.
SCATTER = """
import mlx.core as mx

def scatter(values, *, group=None):
    rows = len(values) // group.size()
    first = group.rank() * rows
    return mx.distributed.all_sum(values, group=group)[first : first + rows]

mx.distributed.sum_scatter = scatter
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


def in_ring(
    program: str, *arguments: str, folder: Path, count: int = 2
) -> list[subprocess.CompletedProcess]:
    """What became of a Python program in every process, by rank."""
    hosts = hostfile(folder, count)
    settings = os.environ | {"MLX_HOSTFILE": str(hosts)}
    started = []
    for rank in range(count):
        environment = settings | {"MLX_RANK": str(rank)}
        process = Process(program, *arguments, env=environment, server=rank)
        started.append(process)
        # Who finds the one before it listening need not try again a second later.
        time.sleep(0.3)
    try:
        return [process.ended(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()


def cases_of(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """What a process saved as `case|key`, by case and key."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, value in np.load(path).items():
        case, _, key = name.partition("|")
        cases.setdefault(case, {})[key] = value
    return cases
