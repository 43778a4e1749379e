"""Starts a program in several processes connected in a ring, like mlx.launch."""

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
# The ring backend has no reduce-scatter, so an all-reduce replaces it.
SCATTER = """
import mlx.core as mx

def scatter(values, *, group=None):
    size = len(values) // group.size()
    first = group.rank() * size
    return mx.distributed.all_sum(values, group=group)[first : first + size]

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
    """Run a Python program in every process; returns the results by rank."""
    hosts = hostfile(folder, count)
    settings = os.environ | {"MLX_HOSTFILE": str(hosts)}
    started = []
    for rank in range(count):
        environment = settings | {"MLX_RANK": str(rank)}
        process = Process(program, *arguments, env=environment, server=rank)
        started.append(process)
        # A rank that finds its predecessor listening need not retry a second later.
        time.sleep(0.3)
    try:
        return [process.result(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()


def cases_of(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Arrays that a process saved as `case|key`, by case and key."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    for name, value in np.load(path).items():
        case, _, key = name.partition("|")
        cases.setdefault(case, {})[key] = value
    return cases
