"""Memory bandwidth, the roofline of decoding."""

import time
from collections.abc import Callable

COPIED_BYTES = 1 << 28
REPEATS = 5


def measure_memory_bandwidth() -> float:
    """Bytes per second that MLX reads and writes."""
    import mlx.core as mx

    array = mx.zeros(COPIED_BYTES // 4)
    mx.eval(array)
    # Every byte is read once and written once.
    return 2 * COPIED_BYTES / shortest_time(lambda: mx.eval(-array))


def shortest_time(work: Callable[[], None]) -> float:
    """Seconds of the fastest of a few runs: other programs only make a run slower."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
