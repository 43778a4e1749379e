"""OpenBLAS for MLX's matrix products and factorizations on Linux CPUs.

MLX's wheel links netlib's reference BLAS, which is 15 to 30 times slower. The dynamic
linker writes the addresses of the BLAS functions into a table when Python imports
mlx.core. `use_openblas` points the entries of that table at a system OpenBLAS, else at
the one in the wheel `scipy-openblas32`.
"""

import ctypes
import importlib.util
import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import launcher
from . import elf_got

# Fedora's threaded library, the usual name, and the library of a Conda environment.
SYSTEM_LIBRARIES = (
    "libopenblasp.so.0",
    "libopenblas.so.0",
    f"{sys.prefix}/lib/libopenblas.so.0",
)
WHEEL_PREFIX = "scipy_"
# OpenBLAS's threads wait actively for 2^N cycles after a product; 26 by default, which
# takes the processor from MLX and from NumPy's own OpenBLAS.
IDLE_TIMEOUT = "18"
BLAS_NAMES = re.compile(r"cblas_\w+|[sdcz][a-z]{2}[a-z0-9]{2,4}_")
ROW_MAJOR, NO_TRANSPOSE = 101, 111


@dataclass(frozen=True)
class Blas:
    """The library that multiplies matrices.

    Attributes:
        name: such as "OpenBLAS 0.3.34 (wheel)", "MLX's own" or "Accelerate".
        path: the file of the library that replaced MLX's own, if one did.
        threads: number of threads, if known.
        reason: why MLX's own is in use, else empty.
    """

    name: str
    path: Path | None = None
    threads: int | None = None
    reason: str = ""


@cache
def use_openblas() -> Blas:
    """Point MLX at the first usable OpenBLAS, once per process, at any time.

    This holds on a machine with a GPU, too: MLX factors matrices on the CPU only.
    Never raises: after any error MLX keeps its own BLAS, with a warning. LMX_CPU=off
    turns it off; LMX_BLAS_THREADS, else OPENBLAS_NUM_THREADS, sets the threads. The
    processes of a run on one machine share its processors.
    """
    if sys.platform == "darwin":
        return Blas("Accelerate")
    if os.environ.get("LMX_CPU") == "off":
        return _unchanged("turned off by LMX_CPU=off")
    try:
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", IDLE_TIMEOUT)
        return _replace()
    except (OSError, ImportError, AttributeError, ValueError, RuntimeError) as error:
        message = "matrix products are slow: OpenBLAS cannot be used (%s)"
        logging.getLogger("lmx").warning(message, error)
        return _unchanged(str(error))


def _unchanged(reason: str) -> Blas:
    return Blas("MLX's own", reason=reason)


def _replace() -> Blas:
    import mlx.core

    if os.uname().machine not in elf_got.MACHINES:
        raise OSError(f"{os.uname().machine} is not supported")
    folder = Path(mlx.core.__file__).parent
    files = [Path(mlx.core.__file__), *sorted(folder.glob("lib/libmlx.so*"))]
    slots = elf_got.imports(files, BLAS_NAMES)
    if "cblas_sgemm" not in slots:
        raise OSError("MLX does not import cblas_sgemm")
    library, prefix, blas = _load_openblas(list(slots))
    addresses = {name: elf_got.address(library[prefix + name]) for name in slots}
    previous = elf_got.write_slots(
        {position: addresses[name] for name in slots for position in slots[name]}
    )
    try:
        if not _mlx_uses(library[f"{prefix}cblas_sgemm"]):
            raise OSError(f"MLX does not call {blas.path}")
    except BaseException:
        elf_got.write_slots(previous)
        raise
    return blas


def _load_openblas(names: list[str]) -> tuple[ctypes.CDLL, str, Blas]:
    """The first usable OpenBLAS: library, prefix of its names, description."""
    threads = _thread_count()
    errors = []
    for path, prefix, origin in _candidates():
        try:
            library = ctypes.CDLL(path)
            version = _version(library, prefix, names, threads)
        except (OSError, AttributeError) as error:
            errors.append(str(error))
            continue
        library[f"{prefix}openblas_set_num_threads"](threads)
        actual = library[f"{prefix}openblas_get_num_threads"]()
        file = elf_got.file_of(library[f"{prefix}cblas_sgemm"])
        return library, prefix, Blas(f"OpenBLAS {version} ({origin})", file, actual)
    raise OSError("; ".join(errors))


def _candidates() -> list[tuple[str, str, str]]:
    """Path, prefix of names and origin of every OpenBLAS that may exist."""
    system = [(name, "", "system") for name in SYSTEM_LIBRARIES]
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return system
    wheel = sorted(Path(spec.origin).parent.glob("lib/libscipy_openblas*.so*"))
    return system + [(str(path), WHEEL_PREFIX, "wheel") for path in wheel]


def _version(library: ctypes.CDLL, prefix: str, names: list[str], threads: int) -> str:
    """The version of an OpenBLAS.

    Raises:
        AttributeError: one of the functions that MLX calls is missing.
        OSError: its integers or its threads do not fit.
    """
    for name in names:
        library[prefix + name]
    describe = library[f"{prefix}openblas_get_config"]
    describe.restype = ctypes.c_char_p
    words = describe().decode().split()
    if "USE64BITINT" in words:
        raise OSError("an OpenBLAS with 64-bit integers")
    if threads > 1 and not library[f"{prefix}openblas_get_parallel"]():
        raise OSError("an OpenBLAS without threads")
    return ".".join(words[1].split(".")[:3])


def _thread_count() -> int:
    for name in ("LMX_BLAS_THREADS", "OPENBLAS_NUM_THREADS"):
        value = os.environ.get(name)
        if value and not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"{name}={value} is not a number of threads")
        if value:
            return int(value)
    threads = min(len(os.sched_getaffinity(0)), _cpu_quota())
    return max(1, threads // launcher.local_process_count())


def _cpu_quota() -> int:
    """The processors that a container may use; sys.maxsize without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return sys.maxsize


def _mlx_uses(sgemm) -> bool:
    """Whether MLX's products are those of `sgemm`, bit for bit.

    Two BLAS libraries sum a thousand products in different orders, so their bits
    differ.
    """
    import mlx.core as mx

    rows, inner, columns = 16, 1024, 8
    with mx.stream(mx.cpu):
        a = mx.sin(mx.arange(rows * inner, dtype=mx.float32)).reshape(rows, inner)
        b = mx.cos(mx.arange(inner * columns, dtype=mx.float32))
        b = b.reshape(inner, columns)
        product = bytes(memoryview(mx.contiguous(a @ b)))
    expected = (ctypes.c_float * (rows * columns))()
    left, right = (ctypes.create_string_buffer(bytes(memoryview(x))) for x in (a, b))
    sgemm(
        *(ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, rows, columns, inner),
        *(ctypes.c_float(1), left, inner, right, columns),
        *(ctypes.c_float(0), expected, columns),
    )
    return product == bytes(expected)
