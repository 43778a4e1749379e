"""`lmx doctor`: versions, device, BLAS, measured speed, cache and Hub."""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from .. import cpu
from ..data import cache
from ..errors import UserError
from ..evaluation.memory_bandwidth import measure_memory_bandwidth, shortest_time
from ..run import terminal
from ..run.progress import readable_size
from ..version import __version__

MATMUL_WIDTH = 1024
# Bytes: a token of a small model, a prompt, the gradients of a large adapter.
ALL_REDUCED = (1 << 13, 1 << 20, 1 << 25)
TF32 = "MLX_ENABLE_TF32"


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is measured."""
    parser.description = "Show hardware, versions and measured speed."
    kinds = parser.add_mutually_exclusive_group()
    for group, flag, meaning in (
        (kinds, "--distributed", "measure the network between processes of mlx.launch"),
        (
            kinds,
            "--verify",
            "in minutes: check results against plain operations, and measure the speed "
            "beside mlx_lm's, with a table and JSON for a report",
        ),
        (parser, "--quick", "with --verify: on smaller models, one run of each"),
        (parser, "--json", "print JSON, for a report"),
    ):
        group.add_argument(flag, action="store_true", help=meaning)


def doctor(arguments: argparse.Namespace) -> int:
    """Print one line per fact; the exit code is 0, or 1 if a check fails.

    Raises:
        UserError: there is one process, and its network is asked for; or an option
            that does nothing without another one.
    """
    if arguments.quick and not arguments.verify:
        raise UserError("--quick needs --verify")
    if arguments.json and arguments.distributed:
        raise UserError("--distributed has no --json")
    if arguments.distributed:
        return _doctor_of_network()
    if arguments.verify:
        from .verification import verify

        # Read by MLX at its first product. Rounded products would hide small faults.
        os.environ.setdefault(TF32, "0")
        facts = [*_machine(), (TF32, os.environ[TF32])]
        if not arguments.json:
            _write(facts)
        return verify(_shareable(facts), quick=arguments.quick, as_json=arguments.json)
    facts = [*_machine(), *_measured()]
    if arguments.json:
        terminal.write_out(json.dumps(_shareable(facts)) + "\n")
    else:
        _write(facts)
    return 0


def _write(facts: list[tuple[str, str]]) -> None:
    for label, value in facts:
        terminal.write_out(f"{label:<18}{value}\n")


def _shareable(facts: list[tuple[str, str]]) -> dict[str, str]:
    """Facts by label, without the name of the user in paths."""
    # In containers it is /, or there is none.
    home = os.path.expanduser("~").rstrip("/") or "~"
    return {label: value.replace(home, "~") for label, value in facts}


def _machine() -> list[tuple[str, str]]:
    """Versions and hardware, by label."""
    import mlx.core as mx

    status, device = cpu.enable(), mx.default_device()
    info = ", ".join(f"{k} {v}" for k, v in mx.device_info().items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    blas = {
        "BLAS file": status.blas.path,
        "BLAS threads": status.blas.threads,
        "BLAS reason": status.blas.reason,
    }
    return [
        ("lmx", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        *((name, _version(name)) for name in ("mlx", "mlx-lm")),
        ("system", platform.platform()),
        ("device", f"{device}: {info}"),
        *_unused_cuda(device.type == mx.gpu),
        ("memory", f"{memory / 2**30:.1f} GiB"),
        ("BLAS", status.blas.name),
        ("CPU functions", "replaced" if status.fast_functions else "MLX's own"),
        *((label, str(value)) for label, value in blas.items() if value),
    ]


def _measured() -> list[tuple[str, str]]:
    """Measured speed, the cache and the Hub, by label."""
    import mlx.core as mx
    from huggingface_hub import constants, get_token

    from ..pipeline.work import rates

    # Speed of matrix products, of memory, and of the work that dry runs count.
    a, b = mx.random.normal((2, MATMUL_WIDTH, MATMUL_WIDTH), key=mx.random.key(0))
    flops = 2 * MATMUL_WIDTH**3 / shortest_time(lambda: mx.eval(a @ b))
    bandwidth = measure_memory_bandwidth()
    speeds = []
    for dtype in [mx.float32] if cpu.on_cpu() else [mx.float32, mx.bfloat16]:
        amounts = asdict(rates(dtype, again=True))
        solved, name = amounts.pop("solved"), str(dtype).rpartition(".")[2]
        text = ", ".join(f"{k} {v / 1e9:,.3g} GFLOP/s" for k, v in amounts.items())
        text += f", solved {solved / 1e6:,.3g} M weights/s ({name})"
        label = "dry runs" if dtype == mx.float32 else "dry runs, 16 bits"
        speeds.append((label, text))
    return [
        ("matmul", f"{flops / 1e9:,.0f} GFLOP/s (float32, 1024 x 1024)"),
        ("memory bandwidth", f"{bandwidth / 1e9:,.1f} GB/s (reading)"),
        *speeds,
        ("cache", f"{cache.root()}, {cache.size() / 1e6:,.1f} MB"),
        ("Hub offline", "yes" if constants.HF_HUB_OFFLINE else "no"),
        ("Hub token", "present" if get_token() else "none"),
    ]


def _doctor_of_network() -> int:
    """Measure all-reduces, for which all processes are needed; rank 0 prints."""
    from .. import launcher
    from ..evaluation import network_bandwidth as network
    from ..run.distributed import join

    ranks = join()
    if ranks.size == 1:
        raise UserError(
            "there is one process, and no network between several",
            hint="mlx.launch -n 2 --hostfile hosts.json -- lmx doctor --distributed",
        )
    with ranks.ends_together():
        link = network.measure_link(ranks)
        times = [network.all_reduce_seconds(ranks, size) for size in ALL_REDUCED]
    if not ranks.is_first:
        return 0
    local = launcher.local_process_count()
    lines = [
        (
            "processes",
            f"{ranks.size} over {launcher.backend()}, {local} on this machine",
        ),
        ("message", f"{link.message_seconds * 1e6:,.0f} us"),
        ("bandwidth", f"{link.bytes_per_second / 1e9:,.2f} GB/s in one direction"),
    ]
    lines += [
        (f"all-reduce {readable_size(size)}", f"{seconds * 1e3:,.2f} ms")
        for size, seconds in zip(ALL_REDUCED, times, strict=True)
    ]
    for label, value in lines:
        terminal.write_out(f"{label:<18}{value}\n")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _unused_cuda(on_gpu: bool) -> list[tuple[str, str]]:
    """A hint if the CPU wheel hides a CUDA wheel: both install the same library file,
    and the one installed last is in use."""
    cuda = [n for n in ("mlx-cuda-12", "mlx-cuda-13") if _version(n) != "not installed"]
    if on_gpu or not cuda:
        return []
    remedy = f"pip install --force-reinstall --no-deps {cuda[0]}"
    return [("CUDA", f"{cuda[0]} is installed but not in use; {remedy}")]
