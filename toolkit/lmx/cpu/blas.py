"""Linux on the CPU: MLX's matrix products by OpenBLAS, not by the reference BLAS.

MLX's wheel links netlib's BLAS, 15 to 30 times slower. Which BLAS a call of MLX reaches
is written in a table when Python imports mlx.core; `use` points the entries of that
table at a system OpenBLAS, else at the one in the wheel `scipy-openblas32`.
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

from ..run import launcher
from . import elf_got

# Fedora's threaded one, the usual name, and that of a Conda environment.
SYSTEM = (
    "libopenblasp.so.0",
    "libopenblas.so.0",
    f"{sys.prefix}/lib/libopenblas.so.0",
)
WHEEL_PREFIX = "scipy_"
NEEDED = re.compile(r"cblas_\w+|[sdcz][a-z]{2}[a-z0-9]{2,4}_")
ROW_MAJOR, NO_TRANSPOSE = 101, 111


@dataclass(frozen=True)
class Blas:
    """What multiplies matrices.

    Attributes:
        name: such as "OpenBLAS 0.3.34 (wheel)", "MLX's own" or "Accelerate".
        path: its file, where it was put in MLX's place.
        threads: how many it uses, where known.
        reason: why it is MLX's own, else empty.
    """

    name: str
    path: Path | None = None
    threads: int | None = None
    reason: str = ""


@cache
def use() -> Blas:
    """Give MLX the fastest BLAS there is; the first call decides, at any time.

    Never raises: on any fault MLX keeps its own, with a warning. LMX_BLAS=off turns it
    off; LMX_BLAS_THREADS, else OPENBLAS_NUM_THREADS, sets the threads. The processes of
    a run on one machine share its processors.
    """
    if sys.platform == "darwin":
        return Blas("Accelerate")
    if os.environ.get("LMX_BLAS") == "off":
        return _own("turned off by LMX_BLAS=off")
    try:
        import mlx.core as mx

        if mx.default_device().type != mx.cpu:
            return _own("MLX computes on the GPU")
        return _replace()
    except (OSError, ImportError, AttributeError, ValueError) as fault:
        message = "matrix products stay slow: no faster BLAS could be used (%s)"
        logging.getLogger("lmx").warning(message, fault)
        return _own(str(fault))


def _own(reason: str) -> Blas:
    return Blas("MLX's own", reason=reason)


def _replace() -> Blas:
    import mlx.core

    if os.uname().machine not in elf_got.MACHINES:
        raise OSError(f"not known how to on {os.uname().machine}")
    folder = Path(mlx.core.__file__).parent
    files = [Path(mlx.core.__file__), *sorted(folder.glob("lib/libmlx.so*"))]
    slots = elf_got.imports(files, NEEDED)
    if "cblas_sgemm" not in slots:
        raise OSError("MLX calls no BLAS by name")
    library, prefix, blas = _find(list(slots))
    addresses = {name: elf_got.address(library[prefix + name]) for name in slots}
    before = elf_got.point(slots, addresses)
    if not _answers(library[f"{prefix}cblas_sgemm"]):
        elf_got.point(slots, before)
        raise OSError(f"MLX does not call {blas.path}")
    return blas


def _find(names: list[str]) -> tuple[ctypes.CDLL, str, Blas]:
    """The first usable OpenBLAS: the library, the prefix of its names, what to tell."""
    threads = _threads()
    faults = []
    for path, prefix, origin in _candidates():
        try:
            library = ctypes.CDLL(path)
            version = _version(library, prefix, names, threads)
        except (OSError, AttributeError) as fault:
            faults.append(str(fault))
            continue
        library[f"{prefix}openblas_set_num_threads"](threads)
        used = library[f"{prefix}openblas_get_num_threads"]()
        file = elf_got.file_of(library[f"{prefix}cblas_sgemm"])
        return library, prefix, Blas(f"OpenBLAS {version} ({origin})", file, used)
    raise OSError("; ".join(faults))


def _candidates() -> list[tuple[str, str, str]]:
    found = [(name, "", "system") for name in SYSTEM]
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return found
    wheel = sorted(Path(spec.origin).parent.glob("lib/libscipy_openblas*.so*"))
    return found + [(str(path), WHEEL_PREFIX, "wheel") for path in wheel]


def _version(library: ctypes.CDLL, prefix: str, names: list[str], threads: int) -> str:
    """The version of an OpenBLAS that can do all MLX asks; OSError when it cannot."""
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


def _threads() -> int:
    for name in ("LMX_BLAS_THREADS", "OPENBLAS_NUM_THREADS"):
        value = os.environ.get(name)
        if value and not (value.isdecimal() and int(value) > 0):
            raise ValueError(f"{name}={value} is not a number of threads")
        if value:
            return int(value)
    threads = min(len(os.sched_getaffinity(0)), _quota())
    return max(1, threads // launcher.neighbours())


def _quota() -> int:
    """The processors a container may fill; very many where it has no limit."""
    try:
        share, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(share) // int(period))
    except (OSError, ValueError):
        return sys.maxsize


def _answers(sgemm) -> bool:
    """Whether MLX's products are those of `sgemm`, bit for bit.

    Every BLAS sums a thousand products in an order and a rounding of its own.
    """
    import mlx.core as mx

    rows, inner, columns = 16, 1024, 8
    a = mx.sin(mx.arange(rows * inner, dtype=mx.float32)).reshape(rows, inner)
    b = mx.cos(mx.arange(inner * columns, dtype=mx.float32)).reshape(inner, columns)
    product = bytes(memoryview(mx.contiguous(a @ b)))
    expected = (ctypes.c_float * (rows * columns))()
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    left, right = (ctypes.create_string_buffer(bytes(memoryview(x))) for x in (a, b))
    shape = (rows, columns, inner)
    head = (ROW_MAJOR, NO_TRANSPOSE, NO_TRANSPOSE, *shape, one)
    sgemm(*head, left, inner, right, columns, zero, expected, columns)
    return product == bytes(expected)
