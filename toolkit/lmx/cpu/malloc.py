"""glibc malloc settings: the process keeps the memory of freed arrays.

MLX allocates every array with malloc. By default glibc maps fresh pages for a large
array, and the kernel clears them each time: half the time of elementwise work on such
arrays.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt, from <malloc.h>.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# Largest array taken from the heap, which is glibc's limit, and free bytes kept in the
# heap.
HEAP_LIMITS = 32 << 20, 1 << 30
# The same limits inside `low_memory`.
LOW_MEMORY_LIMITS = 32 << 20, 256 << 20

_enabled = False


def keep_freed_memory() -> bool:
    """Keep the memory of freed arrays of up to 32 MiB, at most 1 GiB in all.

    Call it before MLX computes, so that all of MLX's threads share one heap.

    Returns:
        Whether the C library supports it; only glibc does.
    """
    global _enabled
    if not _enabled:
        _enabled = _mallopt(ARENA_MAX, 1) and _set_limits(*HEAP_LIMITS)
    return _enabled


@contextmanager
def low_memory() -> Iterator[None]:
    """Keep little freed memory inside this context: memory matters more than time."""
    enabled = _enabled
    if enabled:
        _set_limits(*LOW_MEMORY_LIMITS)
    try:
        yield
    finally:
        if enabled:
            _set_limits(*HEAP_LIMITS)


def trim() -> None:
    """Return all free memory to the kernel."""
    if _enabled:
        ctypes.CDLL(None).malloc_trim(0)


def _set_limits(largest_array: int, free_bytes: int) -> bool:
    return _mallopt(MMAP_THRESHOLD, largest_array) and _mallopt(
        TRIM_THRESHOLD, free_bytes
    )


def _mallopt(parameter: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None).mallopt(parameter, value) == 1
    except AttributeError:
        return False
