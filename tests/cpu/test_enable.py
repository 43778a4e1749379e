"""`cpu.enable` replaces all of it on a Linux CPU, and nothing elsewhere."""

import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from lmx import cpu
from lmx.cpu import patches
from test_blas import BARE

PROGRAM = """
import sys
import psutil  # which asks for the real platform
from lmx import cpu
assert "mlx.core" not in sys.modules
import mlx.core as mx
import mlx.nn as nn

mx.set_default_device(mx.Device(getattr(mx, sys.argv[1])))
sys.platform = sys.argv[2]
mlx_functions = nn.silu, nn.gelu_approx, mx.fast.scaled_dot_product_attention
model = nn.Sequential(nn.QuantizedLinear(64, 64))
status = cpu.enable(model)
again = cpu.enable(model)
assert status == again
functions = nn.silu, nn.gelu_approx, mx.fast.scaled_dot_product_attention
print(
    sum(a is not b for a, b in zip(functions, mlx_functions)),
    type(model.layers[0]).__name__,
    status.fast_functions,
    status.keeps_memory,
    status.blas.name.split()[0],
)
"""
linux_cpu = pytest.mark.skipif(
    sys.platform != "linux" or not cpu.on_cpu(), reason="needs a Linux CPU"
)


def enable(platform: str = "linux", **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "cpu", platform],
        env=BARE | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


@linux_cpu
def test_enable_replaces_functions_layers_and_blas():
    assert enable().startswith("3 FastQuantizedLinear True ")
    assert not enable().endswith("MLX's")


@linux_cpu
@pytest.mark.parametrize(
    ("platform", "environment", "blas"),
    [("linux", {"LMX_CPU": "off"}, "MLX's"), ("darwin", {}, "Accelerate")],
)
def test_enable_changes_nothing(platform, environment, blas):
    expected = f"0 QuantizedLinear False False {blas}"
    assert enable(platform, **environment) == expected


def test_enable_leaves_functions_and_layers_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    model = nn.Sequential(nn.QuantizedLinear(64, 64))
    status = cpu.enable(model)
    assert type(model.layers[0]) is nn.QuantizedLinear
    assert not status.fast_functions
    assert not status.keeps_memory


@linux_cpu
def test_enable_replaces_swiglu_of_loaded_mlx_lm_models():
    cpu.enable()
    from mlx_lm.models import activations, llama

    cpu.enable()
    assert llama.swiglu is activations.swiglu
    assert activations.swiglu.__module__ == patches.__name__
    gate = mx.linspace(-3, 3, patches.MIN_GATE_VALUES)
    assert mx.allclose(activations.swiglu(gate, gate), nn.sigmoid(gate) * gate * gate)


@pytest.mark.parametrize("is_rounded", [False, True])
def test_exact_products_are_recognized(monkeypatch, is_rounded):
    """On a GPU, whose products may have the ten bits of TF32."""
    matmul = mx.matmul

    def gpu_matmul(a, b, *, stream=None):
        if is_rounded and stream is None:
            a, b = (x.astype(mx.float16).astype(mx.float32) for x in (a, b))
        return matmul(a, b, stream=stream)

    monkeypatch.setattr(mx, "matmul", gpu_matmul)
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    cpu.multiplies_exactly.cache_clear()
    assert cpu.multiplies_exactly() is not is_rounded
    cpu.multiplies_exactly.cache_clear()
