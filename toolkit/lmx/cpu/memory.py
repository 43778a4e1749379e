"""The memory of this machine or of its GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx
import psutil

from .. import launcher

# Only Metal has the first. Its GPU shares the memory with all programs.
WORKING_SET = "max_recommended_working_set_size"
DEVICE_MEMORY = (WORKING_SET, "total_memory", "memory_size")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Part of Metal's memory that freed arrays keep, at most, while a model is trained. The
# sizes of arrays change with every batch, so that MLX would keep all the memory.
CACHE_SHARE = 4


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
    """Bytes that this process can get, without swapping on a CPU or a Mac.

    The processes of a run share the memory of their machine; NVIDIA's GPUs have memory
    of their own, one for each process.
    """
    limit, processes = memory_limit(), launcher.local_process_count()
    if _gpu_memory() and not _working_set():
        return limit - mx.get_active_memory()
    free = psutil.virtual_memory().available
    if not _working_set():
        return min(limit, free) // processes
    own = limit // processes - mx.get_active_memory()
    return max(0, min(own, free // processes + mx.get_cache_memory()))


@cache
def keep_resident() -> None:
    """Let Metal keep arrays in memory (macOS 15), from now on. Weights would page out
    between two requests, and the next one would be slow."""
    if size := _working_set():
        mx.set_wired_limit(size // launcher.local_process_count())


@contextmanager
def limited_cache() -> Iterator[None]:
    """Bound what Metal keeps of freed arrays."""
    if not (size := _working_set()):
        yield
        return
    previous = mx.set_cache_limit(size // CACHE_SHARE)
    try:
        yield
    finally:
        mx.set_cache_limit(previous)


def _working_set() -> int:
    return int(mx.device_info().get(WORKING_SET, 0))


def _gpu_memory() -> int:
    info = mx.device_info()
    return next((int(info[key]) for key in DEVICE_MEMORY if key in info), 0)
