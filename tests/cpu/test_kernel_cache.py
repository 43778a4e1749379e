"""The private folders of MLX's kernels: who may write them, and unfinished files."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading

import mlx.core as mx
import pytest
from lmx import cpu
from lmx.cpu import kernel_cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="for Linux")

COMPUTE = """
import os, sys, tempfile
from lmx import cpu
cpu.enable()
import mlx.core as mx
mx.eval(mx.compile(lambda x: mx.sin(x) * 2 + 1)(mx.ones(3)))
print(os.environ["TMPDIR"], tempfile.gettempdir())
"""


def compute(base, **environment):
    """Compute with a kernel in a new process; returns where files go."""
    return subprocess.run(
        [sys.executable, "-c", COMPUTE],
        env=os.environ | {"TMPDIR": str(base)} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A temporary folder for a process that has no private one yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    kernel_cache.use_private_folder.cache_clear()
    yield tmp_path
    kernel_cache.use_private_folder.cache_clear()


def test_folder_belongs_to_the_user(base):
    folder = kernel_cache.use_private_folder()
    assert folder == base / f"lmx-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kernel_cache.kernel_cache().is_relative_to(folder)
    assert tempfile.gettempdir() == str(base)


@pytest.mark.parametrize("kind", ["writable", "link", "file"])
def test_folder_that_others_prepared_is_not_used(base, kind):
    folder = base / f"lmx-{os.getuid()}"
    if kind == "writable":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (base / "theirs").mkdir()
        folder.symlink_to(base / "theirs")
    else:
        folder.write_text("")
    used = kernel_cache.use_private_folder()
    assert used == base / "home" / ".cache" / folder.name


def test_child_uses_the_folder_of_its_parent(base, monkeypatch):
    folder = kernel_cache.use_private_folder()
    kernel_cache.use_private_folder.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert kernel_cache.use_private_folder() == folder


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_kernels_go_there_and_unfinished_ones_are_compiled_again(tmp_path):
    done = compute(tmp_path, LMX_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    private, temporary = done.stdout.split()
    assert temporary == str(tmp_path)
    (library,) = tmp_path.rglob("*.so")
    assert library.is_relative_to(private)
    [header] = tmp_path.rglob("*.gch")
    whole, header_size = library.read_bytes(), header.stat().st_size
    for size in (0, len(whole) - 1):
        library.write_bytes(whole[:size])
        os.utime(library, (0, 0))
        os.truncate(header, size or header.stat().st_size)
        done = compute(tmp_path, LMX_CACHE=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert len(library.read_bytes()) == len(whole)
        # Its size differs a little each time.
        assert header.stat().st_size > header_size // 2


def test_files_that_are_being_written_stay(tmp_path, monkeypatch):
    written, killed = tmp_path / "written.ptx", tmp_path / "killed.ptx"
    pipe = tmp_path / "pipe.so"
    written.write_bytes(b"module")
    killed.write_bytes(b"mod")
    os.mkfifo(pipe)
    monkeypatch.setattr(kernel_cache, "SETTLED", 1)
    writer = threading.Timer(0.2, written.with_suffix(".cu").write_text, ["source"])
    writer.start()
    kernel_cache.remove_unfinished(tmp_path)
    writer.join()
    assert [f.exists() for f in (written, killed, pipe)] == [True, False, False]


@pytest.fixture
def cuda(base, monkeypatch):
    """A machine whose GPU has an architecture."""
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "sm_90"})
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    # Undone after the test, whatever it sets.
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "")
    monkeypatch.delenv("MLX_PTX_CACHE_DIR")
    return base


def test_cuda_kernels_stay_below_the_home_folder(cuda):
    private = cuda / "home" / ".cache" / f"lmx-{os.getuid()}"
    cpu.enable()
    expected = private / "cuda" / f"{mx.__version__}-sm_90"
    assert os.environ["MLX_PTX_CACHE_DIR"] == str(expected)
    assert private.stat().st_mode & 0o777 == 0o700


def test_cuda_kernels_without_a_home_folder(cuda, monkeypatch):
    monkeypatch.delenv("HOME")
    folder = kernel_cache.keep_cuda_kernels()
    assert folder.is_relative_to(cuda / f"lmx-{os.getuid()}")


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [("MLX_PTX_CACHE_DIR", "/elsewhere", "/elsewhere"), ("LMX_CPU", "off", None)],
)
def test_the_user_chooses_where_cuda_kernels_stay(cuda, monkeypatch, name, value, used):
    monkeypatch.setenv(name, value)
    cpu.enable()
    assert os.environ.get("MLX_PTX_CACHE_DIR") == used


def test_cuda_modules_of_killed_processes_are_removed(cuda, monkeypatch):
    folder = kernel_cache.keep_cuda_kernels()
    long_name = folder / "first-part-of-a-long-name"
    long_name.mkdir(parents=True)
    files = [folder / "a.ptx", long_name / "b.ptx", folder / "new.ptx"]
    for file in files:
        file.write_bytes(b"module")
    (folder / "a.cu").write_text("source")
    for file in files[:2]:
        os.utime(file, (0, 0))
    del os.environ["MLX_PTX_CACHE_DIR"]
    monkeypatch.setattr(kernel_cache, "SETTLED", 0.2)
    kernel_cache.keep_cuda_kernels()
    assert [file.exists() for file in files] == [True, False, False]
