"""Linux on the CPU: arrays in memory that the process keeps.

MLX takes every array from malloc. glibc gives a large one pages of its own, which the
kernel clears each time: half the time of sums and products of such arrays.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# The names and numbers of <malloc.h>.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# The most glibc takes; larger arrays go back to the kernel as ever.
LARGEST_KEPT = 32 << 20
KEPT = 1 << 30
# The same where memory is short.
LEAN = 12 << 20, 32 << 20

_is_keeping = False


def keep() -> bool:
    """Keep what arrays of up to 32 MiB leave free, 1 GiB at most.

    To be called before MLX computes: its threads must take from the one heap.

    Returns:
        Whether the C library does so; only glibc does.
    """
    global _is_keeping
    _is_keeping = _set(ARENA_MAX, 1) and _set_kept(LARGEST_KEPT, KEPT)
    return _is_keeping


@contextmanager
def lean() -> Iterator[None]:
    """For a while keep little: where the memory there is counts more than the time."""
    before = _is_keeping
    if before:
        _set_kept(*LEAN)
    try:
        yield
    finally:
        if before:
            _set_kept(LARGEST_KEPT, KEPT)


def trim() -> None:
    """Give back all that is free."""
    if _is_keeping:
        ctypes.CDLL(None).malloc_trim(0)


def _set_kept(largest: int, most: int) -> bool:
    return _set(MMAP_THRESHOLD, largest) and _set(TRIM_THRESHOLD, most)


def _set(name: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None).mallopt(name, value) == 1
    except AttributeError:
        return False
