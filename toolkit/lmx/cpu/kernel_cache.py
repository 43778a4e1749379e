"""A private folder for the kernels that MLX compiles on Linux: on a CPU with g++, on an
NVIDIA GPU with NVRTC.

MLX keeps them in the shared temporary folder under a predictable name, and loads the
files it finds. Here MLX gets a folder that only this user can write, and files
that a killed compiler left unfinished are removed: loading them ends the process.

MLX writes every fused CPU kernel as a C++ file. Four fifths of the time of g++ go into
one large header, the same for all kernels. GCC uses a precompiled header if one lies
where it searches for the header, and a quoted include is searched for beside the source
file first. So the precompiled header is written into MLX's own kernel cache. The
kernels stay the same, byte for byte.
"""

import fcntl
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import mlx
import mlx.core as mx

# Seconds after which no compiler writes to a file any more.
SETTLED = 5
# ELF64: offset of the section table, and size and number of its entries. The linker
# writes the table last.
ELF_MAGIC = b"\x7fELF"
SECTION_TABLE, SECTION_ENTRIES = (0x28, "<Q"), (0x3A, "<HH")
ELF_HEADER = 64

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")
# Locked by the process that makes the header, whose size it has afterwards.
LOCK = "lock"
# GCC ignores a precompiled header that was made with other code generation flags than
# those of MLX's own call.
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC", "-shared", "-w")


def kernel_cache() -> Path:
    """The folder in which this version of MLX keeps its CPU kernels."""
    # The rule of std::filesystem::temp_directory_path, which MLX uses.
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    root = next(filter(None, map(os.environ.get, names)), "/tmp")
    return Path(root) / "mlx" / mx.__version__ / "cpu"


@cache
def use_private_folder() -> Path | None:
    """Let MLX compile into a folder of this user, for the rest of the process.

    Sets TMPDIR, which MLX reads before each compilation. Python's own temporary files
    stay where they are.

    Returns:
        The folder, or None if there is no place for one: MLX then does as it does.
    """
    folder = next(filter(_make_private, _candidates()), None)
    if folder:
        os.environ["TMPDIR"] = str(folder)
        remove_unfinished(kernel_cache())
    return folder


def count_kernels() -> int:
    """Kernels on the disk: what MLX compiles in this process adds to them."""
    folders = [(kernel_cache(), ".so")]
    if folder := os.environ.get("MLX_PTX_CACHE_DIR"):
        folders.append((Path(folder), ".ptx"))
    count = 0
    for place, suffix in folders:
        with suppress(OSError):
            count += sum(name.endswith(suffix) for name in os.listdir(place))
    return count


def keep_cuda_kernels() -> Path | None:
    """Let MLX keep its CUDA kernels in a folder of this user, for the next processes.

    A first run compiles for minutes, so the folder is below the home folder, else below
    the temporary folder. MLX reads MLX_PTX_CACHE_DIR when it first compiles. A
    kernel is for one version of MLX and one architecture; its file name has neither.

    Returns:
        The folder, or None if the user chose one, or if there is no place for one.
    """
    if "MLX_PTX_CACHE_DIR" in os.environ:
        return None
    private = next(filter(_make_private, reversed(_candidates())), None)
    if private is None:
        return None
    architecture = mx.device_info()["architecture"]
    folder = private / "cuda" / f"{mx.__version__}-{architecture}"
    os.environ["MLX_PTX_CACHE_DIR"] = str(folder)
    remove_unfinished(folder)
    return folder


def _candidates() -> list[Path]:
    """The private folder below the temporary folder, else below the home folder."""
    name = f"lmx-{os.getuid()}"
    home = [Path.home() / ".cache" / name] if "HOME" in os.environ else []
    try:
        # Python remembers its choice, so that a changed TMPDIR does not affect it.
        base = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return home
    # A child process inherits the private folder.
    return [base if base.name == name else base / name, *home]


def _make_private(folder: Path) -> bool:
    """Create a folder, or check that only this user can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    is_folder = stat.S_ISDIR(status.st_mode)
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return is_folder and is_own and os.access(folder, os.W_OK)


def remove_unfinished(folder: Path) -> None:
    """Delete the libraries and the CUDA modules that killed compilers left.

    A young file may be that of a running compiler, which gets `SETTLED` seconds.
    """
    deadline = time.time() + SETTLED
    waiting = [file for file in folder.rglob("*") if file.suffix in (".so", ".ptx")]
    while waiting := [file for file in waiting if _is_young(file, deadline)]:
        time.sleep(0.1)


def _is_young(file: Path, deadline: float) -> bool:
    """Whether a file is unfinished, and may still be written. An old one is deleted."""
    # Another process may have removed it.
    with suppress(OSError):
        if file.is_file():
            if _is_finished(file):
                return False
            if time.time() < min(deadline, file.stat().st_mtime + SETTLED):
                return True
        file.unlink()
    return False


def _is_finished(file: Path) -> bool:
    """Whether a CUDA module has its source, which MLX writes after the module; whether
    a library has its last table."""
    if file.suffix == ".ptx":
        return file.with_suffix(".cu").exists()
    size = file.stat().st_size
    with file.open("rb") as stream:
        header = stream.read(ELF_HEADER)
    if len(header) < ELF_HEADER or not header.startswith(ELF_MAGIC):
        return False
    (start,) = struct.unpack_from(SECTION_TABLE[1], header, SECTION_TABLE[0])
    width, count = struct.unpack_from(SECTION_ENTRIES[1], header, SECTION_ENTRIES[0])
    return size >= start + width * count


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
