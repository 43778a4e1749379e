"""MLX traces compiled functions in every test, and fuses operations where it matters.

MLX compiles each fused CPU kernel with g++, and the whole suite has a thousand of them.
Without fusion `mx.compile` traces, simplifies and keeps its state as ever, and MLX
computes the operations one by one. Python can only turn compilation off altogether, so
this calls the C++ function (mlx/compile.h).

The marker `fused` is on tests of bits, of peak memory and of what users run, and on
those that decode so many tokens that a few kernels are worth their time.
"""

import ctypes
from pathlib import Path

import mlx
from lmx import cpu

# CompileMode::no_fuse and CompileMode::enabled.
NO_FUSE, ENABLED = 2, 3
SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"
is_on = True


def fuse(is_wanted: bool) -> None:
    """Only Linux CPUs ever go without: on a GPU its kernels are to be tested.

    Processes that `warm` starts later do the same.
    """
    global is_on
    if cpu.replaces_functions():
        library = Path(next(iter(mlx.__path__))) / "lib" / "libmlx.so"
        getattr(ctypes.CDLL(str(library)), SET_MODE)(ENABLED if is_wanted else NO_FUSE)
    is_on = is_wanted
