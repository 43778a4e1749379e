"""TODO."""

import time
from collections.abc import Callable

COPIED_BYTES = 1 << 28
REPEATS = 5


def memory_traffic() -> float:
    """Bytes per second that MLX reads and writes."""
    import mlx.core as mx

    long = mx.zeros(COPIED_BYTES // 4)
    mx.eval(long)
    # Every byte is read once and written once.
    return 2 * COPIED_BYTES / _best(lambda: mx.eval(-long))


def _best(work: Callable[[], None]) -> float:
    """Seconds of the fastest of a few: other programs can only make it slower."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
