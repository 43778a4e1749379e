"""The memory of this machine or of its GPU."""

import os
from pathlib import Path

import mlx.core as mx

from .. import launcher

DEVICE_MEMORY = ("max_recommended_working_set_size", "total_memory", "memory_size")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_FILE = Path("/proc/meminfo")


def memory_limit() -> int:
    """Bytes a run may use: what the GPU recommends, else this machine's memory."""
    if device := _gpu_memory():
        return device
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return physical


def available_memory() -> int:
    """Bytes that this process can get, without swapping on a CPU.

    The processes of a run share the memory of their machine, and have GPUs of their
    own.
    """
    limit = memory_limit()
    if _gpu_memory():
        return limit - mx.get_active_memory()
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in MEMORY_FILE.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            free = 1024 * int(value.split()[0])
    return min(limit, free) // launcher.local_process_count()


def _gpu_memory() -> int:
    info = mx.device_info()
    return next((int(info[key]) for key in DEVICE_MEMORY if key in info), 0)
