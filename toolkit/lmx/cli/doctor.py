"""`lmx doctor`: what this machine computes with, and how fast."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from .. import __version__, cpu
from ..data import cache
from ..evaluation.memory_bandwidth import _best, memory_traffic

SIDE = 1024


def run() -> int:
    """Print versions, device, BLAS, measured speed and the Hub's state; returns 0."""
    for label, value in (*_software(), *_machine(), *_speed(), *_disk(), *_hub()):
        sys.stdout.write(f"{label:<18}{value}\n")
        sys.stdout.flush()
    return 0


def _software() -> list[tuple[str, str]]:
    packages = [(name, _version(name)) for name in ("mlx", "mlx-lm")]
    python = f"{platform.python_version()} ({sys.executable})"
    return [("lmx", __version__), ("Python", python), *packages]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> list[tuple[str, str]]:
    import mlx.core as mx

    status = cpu.enable()
    facts = ", ".join(f"{k} {v}" for k, v in mx.device_info().items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [
        ("system", platform.platform()),
        ("device", f"{mx.default_device()}: {facts}"),
        *_covered(mx.default_device().type == mx.gpu),
        ("memory", f"{memory / 2**30:.1f} GiB"),
        ("BLAS", status.blas.name),
        ("CPU functions", "replaced" if status.fast_functions else "MLX's own"),
    ]
    details = {
        "BLAS file": status.blas.path,
        "BLAS threads": status.blas.threads,
        "BLAS reason": status.blas.reason,
    }
    return found + [(label, str(value)) for label, value in details.items() if value]


def _covered(on_gpu: bool) -> list[tuple[str, str]]:
    """MLX's CPU and CUDA wheels hold a file of one name; the later one wins."""
    cuda = [n for n in ("mlx-cuda-12", "mlx-cuda-13") if _version(n) != "not installed"]
    if on_gpu or not cuda:
        return []
    remedy = f"pip install --force-reinstall --no-deps {cuda[0]}"
    return [("CUDA", f"{cuda[0]} is installed but not in use; {remedy}")]


def _speed() -> list[tuple[str, str]]:
    """Of float32 products of large matrices, and of reading and writing memory."""
    import mlx.core as mx

    square = mx.sin(mx.arange(SIDE * SIDE, dtype=mx.float32)).reshape(SIDE, SIDE)
    mx.eval(square)
    products = 2 * SIDE**3 / _best(lambda: mx.eval(square @ square))
    moved = memory_traffic()
    return [
        ("matrix products", f"{products / 1e9:,.0f} GFLOP/s (float32, {SIDE} wide)"),
        ("memory traffic", f"{moved / 1e9:,.1f} GB/s (MLX, one array)"),
    ]


def _disk() -> list[tuple[str, str]]:
    return [("cache", f"{cache.root()}, {cache.size() / 1e6:,.1f} MB")]


def _hub() -> list[tuple[str, str]]:
    from huggingface_hub import constants, get_token

    return [
        ("Hub offline", "yes" if constants.HF_HUB_OFFLINE else "no"),
        ("Hub token", "present" if get_token() else "none"),
    ]
