"""What makes MLX fast on Linux CPUs, behind one call: `enable`. See docs/cpu.md.

`LMX_CPU=off` leaves MLX as it is. Nothing here is used on macOS. Beside an NVIDIA GPU,
OpenBLAS is, because MLX factors matrices on the CPU, and a folder for compiled kernels.
"""

import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from .blas import Blas

if TYPE_CHECKING:
    import mlx.core as mx

# Relative error of a product. TF32 has 3e-4, float32 less than 1e-6.
MAX_PRODUCT_ERROR = 1e-5


@dataclass(frozen=True)
class CpuStatus:
    """What `enable` changed in this process.

    Attributes:
        blas: the library that multiplies matrices.
        keeps_memory: freed arrays stay with the process (glibc).
        fast_functions: MLX's exponentials, activations and attention are replaced.
    """

    blas: Blas
    keeps_memory: bool
    fast_functions: bool


def on_cpu() -> bool:
    """Whether MLX computes on the CPU by default."""
    import mlx.core as mx

    return mx.default_device() == mx.Device(mx.cpu)


def unfused(x: "mx.array") -> "mx.array":
    """`x`, which is not fused with what uses it on the CPU.

    A fused kernel is not vectorized there if its operands have several shapes, and
    seldom if it is long: 4 to 27 ns per value, where each operation takes 1 ns.
    """
    import mlx.core as mx

    return mx.contiguous(x) if on_cpu() else x


@cache
def multiplies_exactly() -> bool:
    """Whether products of float32 matrices keep float32's digits. Some GPUs round the
    factors to TF32, unless MLX_ENABLE_TF32=0."""
    import mlx.core as mx

    if on_cpu():
        return True
    size = 64
    factor = mx.sin(mx.arange(size * size, dtype=mx.float32)).reshape(size, size)
    exact = mx.matmul(factor, factor, stream=mx.cpu)
    error = mx.abs(mx.matmul(factor, factor) - exact).max() / mx.abs(exact).max()
    return bool((error < MAX_PRODUCT_ERROR).item())


def replaces_functions() -> bool:
    """Whether `enable` replaces functions: on a Linux CPU, without LMX_CPU=off."""
    return _may_change_mlx() and on_cpu()


def _may_change_mlx() -> bool:
    return sys.platform == "linux" and os.environ.get("LMX_CPU") != "off"


def keep_dequantized(model: Any) -> int:
    """Keep the weights of quantized layers dequantized on a Linux CPU.

    Returns:
        The bytes that they take (`quantized_matmul.keep_dequantized`); 0 elsewhere.
    """
    from . import quantized_matmul

    if not replaces_functions():
        return 0
    return quantized_matmul.keep_dequantized(model)


@cache
def _start_threads() -> Blas:
    """Load OpenBLAS and compute once, so that the threads of both exist."""
    import mlx.core as mx

    from . import blas, denormals

    with denormals.threads_without_denormals():
        library = blas.use_openblas()
        # Without OpenBLAS, nothing was computed yet.
        mx.eval(mx.add(mx.array(1.0), 1.0, stream=mx.cpu))
    return library


def enable(model: Any = None) -> CpuStatus:
    """Replace what is slow in MLX on a Linux CPU. Repeated calls are cheap.

    Call it before MLX computes anything: its compiled functions keep what they were
    traced with, and its threads keep the heap and the treatment of denormal numbers
    that they started with. Call it again after mlx_lm is imported, which has a `swiglu`
    of its own; `models.loader` does both.

    Args:
        model: an `nn.Module` whose quantized layers are to use all cores
            (`quantized_matmul.use_fast_layers`).
    """
    from . import blas, kernel_cache, malloc, patches, quantized_matmul
    from .kernel_cache import precompile_header

    if not replaces_functions():
        if _may_change_mlx():
            kernel_cache.keep_cuda_kernels()
        return CpuStatus(blas.use_openblas(), False, False)
    kernel_cache.use_private_folder()
    keeps_memory = malloc.keep_freed_memory()
    library = _start_threads()
    precompile_header()
    patches.replace_functions()
    patches.replace_swiglu()
    if model is not None:
        quantized_matmul.use_fast_layers(model)
    return CpuStatus(library, keeps_memory, True)
