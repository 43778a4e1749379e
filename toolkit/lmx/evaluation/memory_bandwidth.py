"""Memory bandwidth, the roofline of decoding: every token reads all weights."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

READ_BYTES = 1 << 28
REPEATS = 5


def measure_memory_bandwidth() -> float:
    """Bytes per second that the GPU, or all cores together, read."""
    import mlx.core as mx
    import numpy as np

    from .. import cpu

    if not cpu.on_cpu():
        array = mx.zeros(READ_BYTES // 4)
        mx.eval(array)
        return READ_BYTES / shortest_time(lambda: mx.eval(mx.max(array)))
    # By NumPy, as MLX's reductions use one core, and cost more than reading.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    parts = np.array_split(np.ones(READ_BYTES // 4, np.float32), cores)
    with ThreadPoolExecutor(cores) as threads:
        return READ_BYTES / shortest_time(lambda: list(threads.map(np.max, parts)))


def decoding_seconds(model: Any, count: int, repeats: int = REPEATS) -> float:
    """Seconds of a step that decodes one token of each of `count` sequences."""
    import mlx.core as mx

    from ..models.loader import make_cache

    kv_cache, token = make_cache(model), mx.zeros((count, 1), mx.int32)
    mx.eval(model(mx.zeros((count, 16), mx.int32), cache=kv_cache))
    return shortest_time(lambda: mx.eval(model(token, cache=kv_cache)), repeats)


def shortest_time(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds of the fastest of a few runs: other programs only make a run slower."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def weight_bytes(model: Any, config: dict) -> int:
    """Bytes of the weights that decoding one token reads.

    All weights as they are in memory, except embeddings that are not the LM head and
    inactive experts.
    """
    from mlx.utils import tree_flatten

    from ..cpu.quantized_matmul import kept_weight

    config = config | config.get("text_config", {})
    tied = config.get("tie_word_embeddings", True)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[name] for name in names if config.get(name)), None)
    active = config.get("num_experts_per_tok")
    layers = {
        path: weight
        for path, module in model.named_modules()
        if (weight := kept_weight(module)) is not None
    }
    codes = tree_flatten(model.parameters())
    weights = [(p, v) for p, v in codes if p.rpartition(".")[0] not in layers]
    total = 0
    for path, value in (*weights, *layers.items()):
        if "embed" in path and not tied:
            continue
        is_expert = active and experts and value.ndim == 3 and len(value) == experts
        total += value.nbytes * active // experts if is_expert else value.nbytes
    return total
