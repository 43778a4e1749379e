"""The precompiled header: GCC uses it, kernels stay the same, failures are harmless."""

import shutil
import subprocess
import sys

import mlx
import mlx.core as mx
import pytest
from lmx.cpu.kernel_cache import FLAGS, HEADER, kernel_cache, precompile_header

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++"), reason="needs Linux and g++"
)

SOURCE = f"""#include "{HEADER}"
extern "C" float f(float x) {{ return mlx::core::detail::Exp()(x); }}
"""


def compiled(folder):
    """Compile SOURCE as MLX compiles a kernel there.

    Returns:
        The headers that GCC read, by its option -H, where `!` marks a precompiled one,
        and the library's bytes.
    """
    (folder / "kernel.cpp").write_text(SOURCE)
    include = f"{next(iter(mlx.__path__))}/include"
    command = ["g++", *FLAGS, "-H", "-I", include, "kernel.cpp", "-o", "kernel.so"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stderr, (folder / "kernel.so").read_bytes()


def test_gcc_uses_the_precompiled_header_and_kernels_stay_the_same(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = kernel_cache()
    assert folder == tmp_path / "mlx" / mx.__version__ / "cpu"
    folder.mkdir(parents=True)
    headers, plain = compiled(folder)
    assert not headers.startswith("!")
    file = precompile_header()
    assert file == folder / f"{HEADER}.gch"
    headers, kernel = compiled(folder)
    assert headers.startswith("!")
    assert kernel == plain
    # A second call finds it.
    before = file.stat().st_mtime_ns
    assert precompile_header() == file
    assert file.stat().st_mtime_ns == before
    assert not [*folder.rglob("*.partial")]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "mlx").write_text("a file where MLX wants a folder")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert precompile_header() is None


def test_without_a_compiler_nothing_is_done(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert precompile_header() is None
