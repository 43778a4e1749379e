"""`lmx doctor --verify` on the CPU, and checks that find what is wrong."""

import json
import math
import re

import mlx.core as mx
import pytest
from lmx.cli import verification
from lmx.cli.main import main
from lmx.cli.verification import checks, speed
from lmx.generation.kv_cache.sequence import CacheState
from lmx.quantization import gpu_kernels
from lmx.quantization.qat.fake_quant import FakeQuant


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    """What the command sets is gone after the test."""
    monkeypatch.setenv("MLX_ENABLE_TF32", "1")
    monkeypatch.delenv("MLX_ENABLE_TF32")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return checks.Lab(tmp_path_factory.mktemp("lab"), quick=True)


def test_verify_checks_and_measures(capsys):
    assert main(["doctor", "--verify", "--quick"]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    report = json.loads(next(line for line in lines if line.startswith("{")))
    assert [row["name"] for row in report["checks"]] == [*checks.CHECKS]
    assert all(row["error"] <= row["tolerance"] for row in report["checks"])
    assert [row["name"] for row in report["speed"]] == [*speed.SPEEDS]
    assert all(row["lmx"] > 0 < row["mlx_lm"] for row in report["speed"])
    assert report["facts"]["MLX_ENABLE_TF32"] == "0"
    for name in (*checks.CHECKS, *speed.SPEEDS, "seconds"):
        assert name in output


def broken_attention(queries, keys, values, **options):
    return queries * 1.001


def broken_kernel(rows, *_):
    return rows, 0 * rows


def no_kernel(*_):
    raise RuntimeError("[metal::Device] Unable to build")


def broken_restore(self, positions, snapshot, length):
    RESTORE(self, [0.999 * array for array in positions], snapshot, length)


def broken_export(self, parameters):
    tensors = EXPORT(self, parameters)
    path = next(name for name in tensors if name.endswith("scales"))
    return tensors | {path: tensors[path] * 1.01}


def not_a_number(rows, *_, **__):
    return mx.nan * rows[0]


def broken_pack(codes, bits):
    return PACK(codes ^ 1, bits)


def broken_dequantize(*tensors, **options):
    return DEQUANTIZE(*tensors, **options) + 1e-3


RESTORE = CacheState.restore
EXPORT = FakeQuant.export_tensors
DEQUANTIZE = mx.dequantize
ON_GPU = gpu_kernels, "on_gpu", lambda: True
PACK = checks.pack_codes
BROKEN = {
    "attention": [(mx.fast, "scaled_dot_product_attention", broken_attention)],
    "GPTQ: columns": [ON_GPU, (gpu_kernels, "gptq_columns", broken_kernel)],
    "GPTQ: coordinate descent": [ON_GPU, (gpu_kernels, "descent_columns", no_kernel)],
    "GPTQ: search of GGUF scales": [ON_GPU, (gpu_kernels, "fit_scale", not_a_number)],
    "packed codes, bit for bit": [(checks, "pack_codes", broken_pack)],
    "dequantized weights": [(mx, "dequantize", broken_dequantize)],
    "QAT: exported codes, last weights": [(FakeQuant, "export_tensors", broken_export)],
    "kept prefixes, single requests": [(CacheState, "restore", broken_restore)],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_finds_what_is_broken(name, lab, monkeypatch):
    for owner, attribute, value in BROKEN[name]:
        monkeypatch.setattr(owner, attribute, value)
    row = verification.run_check(name, checks.CHECKS[name], lab)
    assert not row["passed"]
    assert row["error"] > row["tolerance"]
    assert bool(row["reason"]) == (name == "GPTQ: coordinate descent")


def test_other_tokens_and_other_numbers_are_errors(lab, monkeypatch):
    expected = [[(1, -0.5), (2, -0.25)]]
    for found, error in (
        ([[(1, -0.5), (2, -0.5)]], 0.25),
        ([[(1, -0.5), (3, -0.25)]], math.inf),
        ([[(1, math.nan), (2, -0.25)]], math.nan),
    ):
        measured = checks._difference(lab, found, expected)
        assert measured == error or math.isnan(measured) == math.isnan(error)
        row = verification.run_check("", lambda lab, e=measured: (e, 1e-4), lab)
        assert not row["passed"]
    # A GPU that rounds to TF32 may choose between near-ties, and has more room.
    monkeypatch.setattr(lab, "exact", False)
    assert checks._difference(lab, [[(1, -0.5), (3, 0)]], expected) == 0
    assert lab.tolerance(1e-5) == checks.TF32


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, KeyError])
def test_a_failed_check_is_named_and_the_exit_code_is_one(capsys, monkeypatch, kind):
    def wrong(lab):
        return 0.5, 1e-5

    def fails(lab):
        raise kind("[metal::malloc] no memory\nand more")

    speeds = {"own": (fails, lambda lab: [2.0]), "other": (lambda lab: [3, 2], fails)}
    monkeypatch.setattr(checks, "CHECKS", {"sums": wrong})
    monkeypatch.setattr(speed, "SPEEDS", speeds)
    assert main(["doctor", "--verify", "--quick"]) == 1
    output = capsys.readouterr().out
    assert "sums" in output
    assert "5.0e-01   1.0e-05  WRONG" in output
    assert "failed: sums, own\n" in output
    assert re.search("own +failed +2 *\nother +3 +failed", output)
    assert main(["doctor", "--verify", "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["checks"][0]["error"] == 0.5
    assert "[metal::malloc] no memory" in report["speed"][1]["reason"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quick"], "--quick needs --verify"),
        (["--distributed", "--json"], "--distributed has no --json"),
        (["--verify", "--distributed"], "not allowed with"),
    ],
)
def test_options_that_do_nothing_are_refused(capsys, options, words):
    try:
        code = main(["doctor", *options])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert words in capsys.readouterr().err
