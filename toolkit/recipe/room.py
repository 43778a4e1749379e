"""What this machine has: memory, disk, speed."""

import os
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from .. import blas

# A step of a whole model takes 2 to 3.5 times its arithmetic at `training_speed`,
# which has no attention, norms or optimizer (measured on 2 cores, 3 to 60 million
# parameters).
OVERHEAD = 2.5
PROBE_ROWS, PROBE_WIDTH = 256, 512
DEVICE_MEMORY = ("max_recommended_working_set_size", "total_memory", "memory_size")
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Bytes a run may take: what the GPU recommends, else this machine's memory."""
    info = mx.device_info()
    if own := next((int(info[key]) for key in DEVICE_MEMORY if key in info), 0):
        return own
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return physical


def training_speed(dtype: mx.Dtype) -> float:
    """Floating-point operations per second of a small network's training step."""
    blas.use()
    width = PROBE_WIDTH
    net = nn.Sequential(
        nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)
    )
    net.set_dtype(dtype)
    rows = mx.random.normal((PROBE_ROWS, width), key=mx.random.key(0)).astype(dtype)
    step = nn.value_and_grad(net, lambda x: mx.logsumexp(net(x), axis=-1).sum())
    mx.eval(step(rows))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        mx.eval(step(rows))
        seconds.append(time.perf_counter() - start)
    return 6 * PROBE_ROWS * 6 * width**2 / min(seconds)
