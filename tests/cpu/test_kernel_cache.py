"""The private folder of MLX's kernels: who may write it, and unfinished files."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
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
    whole = library.read_bytes()
    for size in (0, 100, len(whole) - 1):
        library.write_bytes(whole[:size])
        os.utime(library, (0, 0))
        done = compute(tmp_path, LMX_CACHE=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert len(library.read_bytes()) == len(whole)


def test_files_that_are_being_written_stay(tmp_path):
    file = tmp_path / "kernel.so"
    file.write_bytes(b"")
    kernel_cache.remove_unfinished(tmp_path)
    assert file.exists()
    os.utime(file, (0, 0))
    kernel_cache.remove_unfinished(tmp_path)
    assert not file.exists()
