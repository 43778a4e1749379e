"""MLX's threads take denormal numbers as zero; Python's own thread does not."""

import json
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import mlx.core as mx
import numpy as np
from lmx import cpu
import lmx.cpu.blas
mx.set_default_device(mx.cpu)
if "without OpenBLAS" in sys.argv[1]:
    cpu.blas._candidates = list
if "enabled" in sys.argv[1]:
    cpu.enable()
# Large enough for all threads of OpenBLAS.
small, factor = mx.full((512, 512), 1e-30), mx.full((512, 512), 1e-12)
largest = [(small * factor).max().item(), (small @ factor).max().item()]
own = float(np.float32(1e-30) * np.float32(1e-12))
print(json.dumps({"mlx": largest, "python": [5e-324, own]}))
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc",
    reason="needs x86-64 and glibc",
)
@pytest.mark.parametrize("mode", ["enabled", "enabled without OpenBLAS", "as it is"])
def test_denormal_results_are_zero_in_mlx_only(mode):
    command = [sys.executable, "-c", PROGRAM, mode]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    values = json.loads(run.stdout)
    assert all(values["python"])
    assert [value == 0 for value in values["mlx"]] == ["enabled" in mode] * 2
