"""Rank, process count and backend from the environment of mlx.launch or mpirun."""

import json
import os
from pathlib import Path

# Set by mlx.launch and by Open MPI.
RANK_NAMES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
# The variable that each backend needs, and the name of the backend.
BACKENDS = {
    "MLX_JACCL_COORDINATOR": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "MLX_HOSTFILE": "ring",
    "OMPI_COMM_WORLD_SIZE": "mpi",
}


def launched_rank() -> int | None:
    """The rank of this process; None for a single process."""
    sizes = _env("MLX_WORLD_SIZE"), _env("OMPI_COMM_WORLD_SIZE")
    # mlx.launch writes an empty host list for a single process.
    empty = backend() == "ring" and not _ring()
    if backend() is None or "1" in sizes or empty:
        return None
    ranks = [int(_env(name)) for name in RANK_NAMES if _env(name)]
    return ranks[0] if ranks else None


def backend() -> str | None:
    """The communication backend: jaccl, nccl, ring, mpi or None."""
    return next((name for key, name in BACKENDS.items() if _env(key)), None)


def first_host() -> str:
    """The host of rank 0, as the launcher names it; empty if it does not."""
    if backend() == "ring":
        return _ring()[0][0].rpartition(":")[0]
    coordinator = _env("MLX_JACCL_COORDINATOR").rpartition(":")[0]
    return coordinator or _env("NCCL_HOST_IP")


def local_process_count() -> int:
    """Number of processes of this run on this machine, as far as known."""
    rank = launched_rank()
    if rank is None:
        return 1
    if backend() == "ring":
        hosts = [addresses[0].rpartition(":")[0] for addresses in _ring()]
        return hosts.count(hosts[rank])
    return int(_env("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)


def process_count() -> int:
    """Number of processes of this run, as far as known."""
    if launched_rank() is None:
        return 1
    hosts = len(_ring() or _read_list("MLX_IBV_DEVICES"))
    return hosts or int(_env("MLX_WORLD_SIZE") or _env("OMPI_COMM_WORLD_SIZE") or 1)


def _ring() -> list[list[str]]:
    """The addresses of every process in the host file of mlx.launch."""
    return _read_list("MLX_HOSTFILE")


def _read_list(name: str) -> list:
    try:
        text = Path(_env(name)).read_text()
        return json.loads(text) if text.strip() else []
    except (OSError, ValueError):
        return []


def _env(name: str) -> str:
    return os.environ.get(name, "")
