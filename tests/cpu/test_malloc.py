"""glibc keeps the memory of freed arrays, and keeps less of it in `low_memory`."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from lmx.cpu import malloc
if sys.argv[1] == "keep":
    assert malloc.keep_freed_memory()
else:
    # Fix glibc's initial value, which it would raise after a large array is freed.
    assert ctypes.CDLL(None).mallopt(malloc.MMAP_THRESHOLD, 128 << 10)
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)
x = mx.zeros((4 << 20,))
for number in range(8):
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    mx.eval(mx.exp(x) + mx.square(x) + mx.sin(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_16_mib_arrays_reuse_pages():
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", PROGRAM, mode]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    assert faults("keep") < faults("default") / 10


LOW_MEMORY = """
import resource, sys
from contextlib import nullcontext
from lmx.cpu import malloc
malloc.keep_freed_memory()
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)
with malloc.low_memory() if sys.argv[1] == "low" else nullcontext():
    for _ in range(3):
        parts = [mx.ones((5 << 20,)) + number for number in range(12)]
        mx.eval(parts)
        del parts
    malloc.trim() if sys.argv[1] == "low" else None
status = open("/proc/self/status").read()
print(status.split("VmRSS:")[1].split()[0])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_low_memory_returns_pages():
    def resident(mode: str) -> int:
        command = [sys.executable, "-c", LOW_MEMORY, mode]
        return 1024 * int(
            subprocess.run(command, capture_output=True, check=True).stdout
        )

    assert resident("low") < resident("normal") - 100e6
