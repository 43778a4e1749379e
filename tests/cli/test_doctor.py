"""`lmx doctor` tells what it found, and never the token."""

import pytest
from lmx import __version__, cpu
from lmx.cli import doctor
from lmx.cpu import blas
from lmx.evaluation import memory_bandwidth


@pytest.fixture
def told(monkeypatch, capsys):
    """What doctor prints, by label, on a small job instead of a long one."""
    monkeypatch.setattr(doctor, "MATMUL_SIZE", 64)
    monkeypatch.setattr(memory_bandwidth, "COPIED_BYTES", 1 << 12)

    def run():
        assert doctor.doctor(None) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line[:18].strip(): line[18:] for line in lines}

    return run


def test_everything_is_told(told, monkeypatch, tmp_path):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "none"))
    own = blas.Blas("MLX's own", reason="turned off")
    status = cpu.CpuStatus(own, keeps_memory=False, fast_functions=False)
    monkeypatch.setattr(cpu, "enable", lambda: status)
    found = told()
    assert found["lmx"] == __version__
    assert found["mlx"][0].isdigit()
    assert found["mlx-lm"][0].isdigit()
    assert found["device"].startswith("Device(")
    assert found["BLAS"] == "MLX's own"
    assert found["BLAS reason"] == "turned off"
    assert found["CPU functions"] == "MLX's own"
    assert "BLAS file" not in found
    assert float(found["memory"].split()[0]) > 0
    assert "GFLOP/s" in found["matmul"]
    assert "GB/s" in found["memory bandwidth"]
    assert found["cache"] == f"{tmp_path / 'none'}, 0.0 MB"


def test_a_fast_blas_has_a_file_and_threads(told, monkeypatch):
    fast = blas.Blas("OpenBLAS 0.3", doctor.os.path.abspath("lib.so"), 2)
    status = cpu.CpuStatus(fast, keeps_memory=True, fast_functions=True)
    monkeypatch.setattr(cpu, "enable", lambda: status)
    found = told()
    assert found["BLAS file"].endswith("lib.so")
    assert found["BLAS threads"] == "2"
    assert found["CPU functions"] == "replaced"
    assert "BLAS reason" not in found


def test_the_token_is_never_printed(told, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = told()
    assert found["Hub offline"] == "yes"
    assert found["Hub token"] == "present"
    assert "secret" not in str(found)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no"))
    assert told()["Hub token"] == "none"


def test_a_cuda_library_under_the_cpu_one_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.4")
    assert doctor._unused_cuda(on_gpu=True) == []
    assert "--force-reinstall --no-deps mlx-cuda-12" in doctor._unused_cuda(False)[0][1]
    monkeypatch.setattr(doctor, "_version", lambda name: "not installed")
    assert doctor._unused_cuda(on_gpu=False) == []
