"""`lmx doctor` prints versions, hardware and speed, and never the Hub token."""

import json
from pathlib import Path

import pytest
from lmx import __version__, cpu
from lmx.cli import doctor
from lmx.cli.main import main
from lmx.cpu import blas
from lmx.evaluation import memory_bandwidth
from lmx.pipeline import work
from processes import in_ring


@pytest.fixture
def doctor_output(monkeypatch, capsys):
    """The output of doctor by label, with a small matrix product."""
    monkeypatch.setattr(memory_bandwidth, "READ_BYTES", 1 << 12)
    speed = work.Work(1e9, 2e9, 3e9, 4e9, 5e6)
    monkeypatch.setattr(work, "_measure", lambda dtype: speed)

    def run():
        assert main(["doctor"]) == 0
        lines = capsys.readouterr().out.splitlines()
        output = {line[:18].strip(): line[18:] for line in lines}
        assert main(["doctor", "--json"]) == 0
        shared = json.loads(capsys.readouterr().out)
        assert shared.keys() == output.keys()
        assert str(Path.home()) not in str(shared)
        return output

    return run


def test_doctor_prints_every_fact(doctor_output, monkeypatch, tmp_path):
    monkeypatch.setenv("LMX_CACHE", str(tmp_path / "none"))
    default = blas.Blas("MLX's own", reason="turned off")
    status = cpu.CpuStatus(default, keeps_memory=False, fast_functions=False)
    monkeypatch.setattr(cpu, "enable", lambda: status)
    output = doctor_output()
    assert output["lmx"] == __version__
    assert output["mlx"][0].isdigit()
    assert output["mlx-lm"][0].isdigit()
    assert output["device"].startswith("Device(")
    assert output["BLAS"] == "MLX's own"
    assert output["BLAS reason"] == "turned off"
    assert output["CPU functions"] == "MLX's own"
    assert "BLAS file" not in output
    assert float(output["memory"].split()[0]) > 0
    assert "GFLOP/s" in output["matmul"]
    assert "GB/s" in output["memory bandwidth"]
    assert "trained 1 GFLOP/s" in output["dry runs"]
    assert "solved 5 M weights/s (float32)" in output["dry runs"]
    assert (tmp_path / "none" / work.RATES).is_dir()
    assert output["cache"] == f"{tmp_path / 'none'}, 0.0 MB"


def test_doctor_prints_blas_file_and_threads(doctor_output, monkeypatch):
    fast = blas.Blas("OpenBLAS 0.3", doctor.os.path.abspath("lib.so"), 2)
    status = cpu.CpuStatus(fast, keeps_memory=True, fast_functions=True)
    monkeypatch.setattr(cpu, "enable", lambda: status)
    output = doctor_output()
    assert output["BLAS file"].endswith("lib.so")
    assert output["BLAS threads"] == "2"
    assert output["CPU functions"] == "replaced"
    assert "BLAS reason" not in output


def test_doctor_never_prints_the_token(doctor_output, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    output = doctor_output()
    assert output["Hub offline"] == "yes"
    assert output["Hub token"] == "present"
    assert "secret" not in str(output)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no"))
    assert doctor_output()["Hub token"] == "none"


def test_doctor_reports_an_unused_cuda_wheel(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "0.32.4")
    assert doctor._unused_cuda(on_gpu=True) == []
    assert "--force-reinstall --no-deps mlx-cuda-12" in doctor._unused_cuda(False)[0][1]
    monkeypatch.setattr(doctor, "_version", lambda name: "not installed")
    assert doctor._unused_cuda(on_gpu=False) == []


DISTRIBUTED = """
import sys
from lmx.cli.main import main
from lmx.cli import doctor
from lmx.evaluation import network_bandwidth

network_bandwidth.LARGE_BYTES, network_bandwidth.SMALL_REPEATS = 1 << 20, 5
doctor.ALL_REDUCED = 1 << 13, 1 << 17, 1 << 21
sys.exit(main(["doctor", "--distributed"]))
"""


def test_doctor_measures_the_network(tmp_path):
    first, second = in_ring(DISTRIBUTED, folder=tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], second.stderr
    assert second.stdout == ""
    assert "2 over ring, 2 on this machine" in first.stdout
    assert first.stdout.count(" ms\n") == len(doctor.ALL_REDUCED)
    assert "GB/s in one direction" in first.stdout


def test_doctor_measures_no_network_of_one_process(capsys):
    assert main(["doctor", "--distributed"]) == 2
    assert "mlx.launch -n 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("home", "shown"), [("/home/ada", "~/x"), ("/", "/home/ada/x")]
)
def test_paths_for_a_report_have_no_home(monkeypatch, home, shown):
    monkeypatch.setenv("HOME", home)
    assert doctor._shareable([("cache", "/home/ada/x")]) == {"cache": shown}
