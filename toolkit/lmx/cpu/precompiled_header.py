"""A precompiled header for the kernels that MLX's CPU backend compiles at run time.

MLX writes every fused CPU kernel as a C++ file and compiles it with g++ when it first
meets it. Four fifths of that time go into one large header, the same for all kernels.
GCC uses a precompiled header if one lies where it searches for the header, and a quoted
include is searched for beside the source file first. So the precompiled header is
written into MLX's own kernel cache. The kernels stay the same, byte for byte.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import mlx

from .kernel_cache import kernel_cache

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
# Locked by the process that makes the header, whose size it has afterwards.
LOCK = "lock"
# GCC ignores a precompiled header that was made with other code generation flags than
# those of MLX's own call.
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-w")


def precompile_header() -> Path | None:
    """Write the precompiled header once per machine and version of MLX (2 seconds).

    Only speed depends on it, so no failure is an error.

    Returns:
        The file, or None where there is no g++, no header or no room for it (50 MB).
    """
    target = kernel_cache() / f"{HEADER}.gch"
    if _is_whole(target):
        return target
    compiler = shutil.which("g++")
    include = Path(next(iter(mlx.__path__))) / "include"
    if sys.platform != "linux" or not compiler or not (include / HEADER).is_file():
        return None
    partial = target.with_name(f"{target.name}.partial")
    command = [compiler, *FLAGS, "-I", include, "-x", "c++-header", include / HEADER]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(LOCK).open("a") as lock:
            # Processes that start together wait for the first one.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                target.unlink(missing_ok=True)
                command += ["-o", partial]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                os.replace(partial, target)
                os.truncate(lock.name, 0)
                lock.write(str(target.stat().st_size))
    except (OSError, subprocess.SubprocessError):
        return None
    return target


def _is_whole(target: Path) -> bool:
    """Whether it has the size that it was made with: GCC stops at a shorter one."""
    with suppress(OSError):
        return target.with_name(LOCK).read_text() == str(target.stat().st_size)
    return False
