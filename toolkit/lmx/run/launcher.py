"""What mlx.launch or mpirun has told this process about the others."""

import json
import os
from pathlib import Path

# Of mlx.launch, then of Open MPI.
RANK_NAMES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")
# What each way of connecting wants to know, and its name.
BACKENDS = {
    "MLX_JACCL_COORDINATOR": "jaccl",
    "NCCL_HOST_IP": "nccl",
    "MLX_HOSTFILE": "ring",
    "OMPI_COMM_WORLD_SIZE": "mpi",
}


def launched_rank() -> int | None:
    """This process's number among several, from 0; None if it was started alone."""
    sizes = _says("MLX_WORLD_SIZE"), _says("OMPI_COMM_WORLD_SIZE")
    # For one process mlx.launch leaves the list of hosts empty.
    empty = backend() == "ring" and not _ring()
    if backend() is None or "1" in sizes or empty:
        return None
    ranks = [int(_says(name)) for name in RANK_NAMES if _says(name)]
    return ranks[0] if ranks else None


def backend() -> str | None:
    """How the processes are to be connected: jaccl, nccl, ring or mpi."""
    return next((name for key, name in BACKENDS.items() if _says(key)), None)


def neighbours() -> int:
    """Processes of this run on this machine, this one included, as far as known."""
    rank = launched_rank()
    if rank is None:
        return 1
    if backend() == "ring":
        hosts = [addresses[0].rpartition(":")[0] for addresses in _ring()]
        return hosts.count(hosts[rank])
    return int(_says("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)


def processes() -> int:
    """Processes of this run, as far as known."""
    if launched_rank() is None:
        return 1
    listed = len(_ring() or _listed("MLX_IBV_DEVICES"))
    return listed or int(_says("MLX_WORLD_SIZE") or _says("OMPI_COMM_WORLD_SIZE") or 1)


def _ring() -> list[list[str]]:
    """The addresses of every process, as `mlx.launch` lists them for a ring."""
    return _listed("MLX_HOSTFILE")


def _listed(name: str) -> list:
    try:
        text = Path(_says(name)).read_text()
        return json.loads(text) if text.strip() else []
    except (OSError, ValueError):
        return []


def _says(name: str) -> str:
    return os.environ.get(name, "")
