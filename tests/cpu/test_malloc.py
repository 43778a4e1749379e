"""Kept memory: pages are not asked of the kernel again for every array."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from lmx.cpu import malloc
if sys.argv[1] == "keep":
    assert malloc.keep()
else:
    # As glibc begins; left alone it may raise this, by what is freed when.
    assert ctypes.CDLL(None).mallopt(malloc.MMAP_THRESHOLD, 128 << 10)
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)
x = mx.zeros((4 << 20,))
for number in range(12):
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mx.eval(mx.exp(x) + mx.square(x) + mx.sin(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_arrays_of_16_mib_take_pages_that_are_there():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert faults("keep") < faults("as it was") / 10


LEAN = """
import resource, sys
from contextlib import nullcontext
from lmx.cpu import malloc
malloc.keep()
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)
with malloc.lean() if sys.argv[1] == "lean" else nullcontext():
    for _ in range(3):
        parts = [mx.ones((5 << 20,)) + number for number in range(12)]
        mx.eval(parts)
        del parts
    malloc.trim() if sys.argv[1] == "lean" else None
status = open("/proc/self/status").read()
print(status.split("VmRSS:")[1].split()[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_where_memory_is_short_little_is_kept():
    def resident(how: str) -> int:
        command = [sys.executable, "-c", LEAN, how]
        return 1024 * int(
            subprocess.run(command, capture_output=True, check=True).stdout
        )

    assert resident("lean") < resident("as ever") - 100e6
