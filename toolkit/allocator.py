"""Linux on the CPU: arrays in memory that the process keeps.

MLX takes every array from malloc. glibc gives a large one pages of its own, which the
kernel clears each time: half the time of sums and products of such arrays.
"""

import ctypes
import sys

# The names and numbers of <malloc.h>.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
# The most glibc takes; larger arrays go back to the kernel as ever.
LARGEST_KEPT = 32 << 20
KEPT = 1 << 30


def keep() -> bool:
    """Keep what arrays of up to 32 MiB leave free, 1 GiB at most.

    To be called before MLX computes: its threads must take from the one heap.

    Returns:
        Whether the C library does so; only glibc does.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    wanted = {ARENA_MAX: 1, MMAP_THRESHOLD: LARGEST_KEPT, TRIM_THRESHOLD: KEPT}
    return all(set_option(name, value) == 1 for name, value in wanted.items())
