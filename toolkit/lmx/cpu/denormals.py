"""MLX's threads take denormal float32 numbers as zero, on x86-64 with glibc.

Gradients and Adam's averages become denormal (below 1.2e-38). Intel's cores are a
hundred times slower with such numbers, so training is up to nine times slower.
Python's own thread, and with it Python's and NumPy's numbers, is left as it is.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Flush-to-zero and denormals-are-zero, bits of the register MXCSR.
FLUSH = 0x8040
# glibc's fenv_t: the state of the x87 unit, then MXCSR.
ENVIRONMENT = ctypes.c_uint32 * 8
MXCSR = 7


@contextmanager
def threads_without_denormals() -> Iterator[None]:
    """Threads that are created inside this context take denormal numbers as zero.

    A thread inherits MXCSR from the thread that creates it. MLX creates the thread of
    a stream at its first operation.
    """
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        yield
        return
    libm = ctypes.CDLL("libm.so.6")
    previous, flushing = ENVIRONMENT(), ENVIRONMENT()
    libm.fegetenv(previous)
    libm.fegetenv(flushing)
    flushing[MXCSR] |= FLUSH
    libm.fesetenv(flushing)
    try:
        yield
    finally:
        libm.fesetenv(previous)
