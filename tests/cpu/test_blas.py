"""OpenBLAS in place of MLX's BLAS: proven by its bits; errors are one warning."""

import ctypes
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
from lmx.cpu import blas, elf_got

linux = pytest.mark.skipif(
    sys.platform != "linux" or not find_spec("scipy_openblas32"),
    reason="needs Linux and the OpenBLAS wheel",
)
# Uses MLX alone, so that it does not depend on lmx's own check.
MULTIPLY = """
import mlx.core as mx
a = mx.sin(mx.arange(64 * 512, dtype=mx.float32)).reshape(64, 512)
product = lambda: mx.contiguous(a @ a.T).tolist()
"""
# Programs see no other setting of this process.
BARE = {
    "PATH": "/usr/bin:/bin",
    "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    "LMX_BLAS_THREADS": "1",
}
USE = "from lmx.cpu import blas; used = blas.use_openblas()\n"


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    # These tests are about the OpenBLAS of the wheel, not of the system.
    setup = "import sys, lmx.cpu.blas as b; b.SYSTEM_LIBRARIES = ('no-such-library',)\n"
    setup += "assert 'mlx.core' not in sys.modules\n"
    return subprocess.run(
        [sys.executable, "-c", setup + program],
        env=BARE | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output(program: str, **environment: str) -> str:
    done = python(program, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def device_is_cpu() -> bool:
    import mlx.core as mx

    return mx.default_device().type == mx.cpu


@linux
@pytest.mark.skipif(not device_is_cpu(), reason="MLX computes on the GPU")
class TestUseOpenblas:
    def test_order_of_imports_and_products_does_not_matter(self):
        tell = "print(used.name, product())"
        first = output(USE + MULTIPLY + tell)
        imported = output(MULTIPLY + USE + tell)
        multiplied = output(MULTIPLY + "slow = product()\n" + USE + tell)
        bound = output(MULTIPLY + USE + tell, LD_BIND_NOW="1")
        assert first.startswith("OpenBLAS 0.3.")
        assert first == imported == multiplied == bound

    def test_products_change_within_rounding(self):
        gap = "print(max(abs(x - y) for p, q in zip(slow, product())"
        program = (
            MULTIPLY + "slow = product()\n" + USE + gap + " for x, y in zip(p, q)))"
        )
        # The largest entry, a sum of 512 squared sines, is close to 256.
        assert 0 < float(output(program)) < 1e-5 * 256
        # With MLX's own BLAS both products have the same bits.
        assert float(output(program, LMX_CPU="off")) == 0

    def test_linear_algebra_works(self):
        program = USE + (
            "import mlx.core as mx\n"
            "a = mx.array([[2.0, 1.0], [1.0, 2.0]])\n"
            "print(*mx.linalg.eigvalsh(a, stream=mx.cpu).tolist(),"
            "*mx.linalg.cholesky(a, stream=mx.cpu)[0].tolist(),"
            "mx.linalg.inv(a, stream=mx.cpu)[0, 0].item())"
        )
        numbers = [float(word) for word in output(program).split()]
        assert numbers == pytest.approx([1, 3, 2**0.5, 0, 2 / 3], abs=1e-6)

    def test_environment_sets_threads(self):
        tell = USE + "print(used.threads)"
        assert output(tell, LMX_BLAS_THREADS="2") == "2\n"
        both = output(tell, LMX_BLAS_THREADS="1", OPENBLAS_NUM_THREADS="2")
        assert both == "1\n"
        assert output(tell, LMX_BLAS_THREADS="", OPENBLAS_NUM_THREADS="3") == "3\n"

    def test_lmx_cpu_off_keeps_mlx_blas(self):
        assert "LMX_CPU=off" in output(USE + "print(used)", LMX_CPU="off")

    @pytest.mark.parametrize(
        ("setup", "reason"),
        [
            (
                "import lmx.cpu.elf_got as l; l.write_slots = lambda *_: {}",
                "does not call",
            ),
            (
                "import lmx.cpu.blas as b\n"
                "def fail(sgemm): raise RuntimeError('no product')\n"
                "b._mlx_uses = fail",
                "no product",
            ),
            ("import sys; sys.modules['scipy_openblas32'] = None", "no-such-library"),
            ("import lmx.cpu.elf_got as l; l.MACHINES = ()", "is not supported"),
            ("import os; os.environ['LMX_BLAS_THREADS'] = 'all'", "=all is not a"),
        ],
    )
    def test_error_is_one_warning_with_reason(self, setup, reason):
        done = python(
            f"{setup}\n{USE}blas.use_openblas(); print(used.name, used.reason)"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("MLX's own")
        assert reason in done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert reason in done.stderr

    @pytest.mark.parametrize(
        "failure",
        [
            # The products are of another library.
            "blas._mlx_uses = lambda sgemm: False",
            # An error of MLX.
            "blas._mlx_uses = lambda sgemm: 1 / 0",
            # The linker's page cannot be written, after some were.
            "turns = iter([1, 1]); real = elf_got._make_writable\n"
            "def some(position):\n"
            "    if not next(turns, 0): raise OSError('no')\n"
            "    real(position)\n"
            "elf_got._make_writable = some",
        ],
    )
    def test_failed_replacement_leaves_every_entry_as_it_was(self, failure):
        program = (
            "import ctypes, mlx.core\n"
            "from pathlib import Path\n"
            "from lmx.cpu import blas, elf_got\n"
            "folder = Path(mlx.core.__file__).parent\n"
            "files = [Path(mlx.core.__file__), *folder.glob('lib/libmlx.so*')]\n"
            "found = elf_got.imports(files, blas.BLAS_NAMES).values()\n"
            "slots = [slot for positions in found for slot in positions]\n"
            "assert len(slots) > 2\n"
            "tell = lambda: [ctypes.c_size_t.from_address(s).value for s in slots]\n"
            "before = tell()\n"
        )
        attempt = (
            "\ntry: print(blas.use_openblas().name, end=' ')\n"
            "except ZeroDivisionError: print('stopped', end=' ')\n"
            "print(tell() == before)"
        )
        done = python(program + failure + attempt)
        assert done.stdout in ("MLX's own True\n", "stopped True\n"), done.stderr
        # The check itself can fail.
        assert output(program + attempt).endswith("(wheel) False\n")

    def test_bits_identify_the_blas(self):
        program = "from lmx.cpu import blas\n" + (
            "import ctypes\n"
            "path, prefix, _ = blas._candidates()[-1]\n"
            "sgemm = ctypes.CDLL(path)[prefix + 'cblas_sgemm']\n"
            "before = blas._mlx_uses(sgemm)\n"
            "blas.use_openblas(); print(before, blas._mlx_uses(sgemm))"
        )
        assert output(program) == "False True\n"

    def test_other_blas_libraries_are_skipped(self):
        program = USE.replace(
            "used =",
            "import mlx.core, glob, os;"
            "root = os.path.dirname(os.path.dirname(mlx.core.__file__));"
            "libraries = glob.glob(root + '/mlx_cpu.libs/libblas*');"
            "blas.SYSTEM_LIBRARIES = (*libraries, 'x');"
            "assert len(blas.SYSTEM_LIBRARIES) > 1; used =",
        )
        assert output(program + "print(used.name)").startswith("OpenBLAS")


def test_container_quota_limits_threads(monkeypatch):
    monkeypatch.delenv("LMX_BLAS_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        blas.os, "sched_getaffinity", lambda _: range(64), raising=False
    )
    for text, threads in [("250000 100000", 2), ("50000 100000", 1), ("max 100", 64)]:
        monkeypatch.setattr(blas.Path, "read_text", lambda _, text=text: text)
        assert blas._thread_count() == threads


def test_macos_keeps_accelerate(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.use_openblas.__wrapped__() == blas.Blas("Accelerate")


def test_processes_share_the_processors(monkeypatch):
    for name in ("LMX_BLAS_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(blas, "_cpu_quota", lambda: 8)
    monkeypatch.setattr(
        blas.os, "sched_getaffinity", lambda _: range(16), raising=False
    )
    for neighbours, threads in [(1, 8), (2, 4), (3, 2), (20, 1)]:
        count = partial(int, neighbours)
        monkeypatch.setattr(blas.launcher, "local_process_count", count)
        assert blas._thread_count() == threads
    monkeypatch.setenv("LMX_BLAS_THREADS", "5")
    assert blas._thread_count() == 5


def test_every_library_gets_its_own_address_back():
    table = (ctypes.c_size_t * 4)(11, 22, 33, 44)
    first = ctypes.addressof(table)
    slots = {first: 5, first + 16: 5}
    previous = elf_got.write_slots(slots)
    assert list(table) == [5, 22, 5, 44]
    assert elf_got.write_slots(previous) == slots
    assert list(table) == [11, 22, 33, 44]
