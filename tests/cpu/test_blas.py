"""MLX's BLAS: replaced whenever asked, proven by bits, given up with a reason."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from lmx.cpu import blas

linux = pytest.mark.skipif(
    sys.platform != "linux" or not find_spec("scipy_openblas32"),
    reason="MLX has a fast BLAS of its own here",
)
# Written in MLX's terms, so that it does not depend on how the toolkit finds out.
MULTIPLY = """
import mlx.core as mx
a = mx.sin(mx.arange(64 * 512, dtype=mx.float32)).reshape(64, 512)
product = lambda: mx.contiguous(a @ a.T).tolist()
"""
USE = "from lmx.cpu import blas; used = blas.use()\n"


def python(program: str, **environment: str) -> subprocess.CompletedProcess:
    # An OpenBLAS of the system would be as good; these tests are about the wheel's.
    setup = "import sys, lmx.cpu.blas; lmx.cpu.blas.SYSTEM = ('no-such-library',)\n"
    setup += "assert 'mlx.core' not in sys.modules\n"
    return subprocess.run(
        [sys.executable, "-c", setup + program],
        env={"PATH": "/usr/bin:/bin", "LMX_BLAS_THREADS": "1", **environment},
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
@pytest.mark.skipif(not device_is_cpu(), reason="MLX computes on the GPU here")
class TestOnTheCpu:
    def test_the_order_of_imports_and_products_does_not_matter(self):
        tell = "print(used.name, product())"
        first = output(USE + MULTIPLY + tell)
        imported = output(MULTIPLY + USE + tell)
        multiplied = output(MULTIPLY + "slow = product()\n" + USE + tell)
        bound = output(MULTIPLY + USE + tell, LD_BIND_NOW="1")
        assert first.startswith("OpenBLAS 0.3.")
        assert first == imported == multiplied == bound

    def test_products_change_and_stay_right(self):
        gap = "print(max(abs(x - y) for p, q in zip(slow, product())"
        program = (
            MULTIPLY + "slow = product()\n" + USE + gap + " for x, y in zip(p, q)))"
        )
        # The largest entry, a sum of 512 squared sines, is near 256.
        assert 0 < float(output(program)) < 1e-5 * 256
        # Without another BLAS the very same bits come out twice.
        assert float(output(program, LMX_BLAS="off")) == 0

    def test_linear_algebra_still_works(self):
        program = USE + (
            "import mlx.core as mx\n"
            "a = mx.array([[2.0, 1.0], [1.0, 2.0]])\n"
            "print(*mx.linalg.eigvalsh(a, stream=mx.cpu).tolist(),"
            "*mx.linalg.cholesky(a, stream=mx.cpu)[0].tolist(),"
            "mx.linalg.inv(a, stream=mx.cpu)[0, 0].item())"
        )
        numbers = [float(word) for word in output(program).split()]
        assert numbers == pytest.approx([1, 3, 2**0.5, 0, 2 / 3], abs=1e-6)

    def test_threads(self):
        tell = USE + "print(used.threads)"
        assert output(tell, LMX_BLAS_THREADS="2") == "2\n"
        both = output(tell, LMX_BLAS_THREADS="1", OPENBLAS_NUM_THREADS="2")
        assert both == "1\n"
        assert output(tell, LMX_BLAS_THREADS="", OPENBLAS_NUM_THREADS="3") == "3\n"

    def test_off(self):
        assert "LMX_BLAS=off" in output(USE + "print(used)", LMX_BLAS="off")

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            ("import lmx.cpu.elf_got as l; l.point = lambda *_: {}", "does not call"),
            ("import sys; sys.modules['scipy_openblas32'] = None", "no-such-library"),
            ("import lmx.cpu.elf_got as l; l.MACHINES = ()", "not known how"),
            ("import os; os.environ['LMX_BLAS_THREADS'] = 'all'", "=all is not a"),
        ],
    )
    def test_a_fault_is_one_warning_and_a_reason(self, fault, reason):
        done = python(f"{fault}\n{USE}blas.use(); print(used.name, used.reason)")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("MLX's own")
        assert reason in done.stdout
        assert len(done.stderr.splitlines()) == 1
        assert reason in done.stderr

    def test_bits_tell_one_blas_from_another(self):
        program = USE.replace("; used = blas.use()", "") + (
            "import ctypes\n"
            "path, prefix, _ = blas._candidates()[-1]\n"
            "sgemm = ctypes.CDLL(path)[prefix + 'cblas_sgemm']\n"
            "before = blas._answers(sgemm)\n"
            "blas.use(); print(before, blas._answers(sgemm))"
        )
        assert output(program) == "False True\n"

    def test_a_library_that_is_no_openblas_is_passed_over(self):
        program = USE.replace(
            "used =",
            "import mlx.core, glob, os;"
            "root = os.path.dirname(os.path.dirname(mlx.core.__file__));"
            "blas.SYSTEM = tuple(glob.glob(root + '/mlx_cpu.libs/libblas*')) + ('x',);"
            "assert len(blas.SYSTEM) > 1; used =",
        )
        assert output(program + "print(used.name)").startswith("OpenBLAS")


def test_a_container_limits_the_threads(monkeypatch):
    monkeypatch.delenv("LMX_BLAS_THREADS", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    monkeypatch.setattr(
        blas.os, "sched_getaffinity", lambda _: range(64), raising=False
    )
    for text, threads in [("250000 100000", 2), ("50000 100000", 1), ("max 100", 64)]:
        monkeypatch.setattr(blas.Path, "read_text", lambda _, text=text: text)
        assert blas._threads() == threads


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.use.__wrapped__() == blas.Blas("Accelerate")


def test_processes_of_a_machine_share_its_processors(monkeypatch):
    for name in ("LMX_BLAS_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(blas, "_quota", lambda: 8)
    monkeypatch.setattr(
        blas.os, "sched_getaffinity", lambda _: range(16), raising=False
    )
    for neighbours, threads in [(1, 8), (2, 4), (3, 2), (20, 1)]:
        monkeypatch.setattr(blas.launcher, "neighbours", lambda n=neighbours: n)
        assert blas._threads() == threads
    monkeypatch.setenv("LMX_BLAS_THREADS", "5")
    assert blas._threads() == 5
