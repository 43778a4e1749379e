"""MLX traces compiled functions in every test, and fuses operations where it matters.

MLX compiles each fused CPU kernel with g++, and the whole suite has a thousand of them.
Without fusion `mx.compile` traces, simplifies and keeps its state as ever, and MLX
computes the operations one by one. Python can only turn compilation off altogether, so
this calls the C++ function (mlx/compile.h).
"""

import ctypes
from pathlib import Path

import mlx
from lmx import cpu

# CompileMode::no_fuse and CompileMode::enabled.
NO_FUSE, ENABLED = 2, 3
SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"


def fuse(is_on: bool) -> None:
    """Only Linux CPUs ever go without: on a GPU its kernels are to be tested."""
    if cpu.replaces_functions():
        library = Path(next(iter(mlx.__path__))) / "lib" / "libmlx.so"
        getattr(ctypes.CDLL(str(library)), SET_MODE)(ENABLED if is_on else NO_FUSE)
