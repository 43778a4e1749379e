"""One arithmetic for two libraries: NumPy on a CPU, MLX on a GPU.

Column-by-column updates are thousands of small operations. On a CPU, NumPy starts one
in a tenth of the time that MLX takes.
"""

import math
from collections.abc import Callable
from functools import cache, wraps

import mlx.core as mx

from ..cpu import on_cpu
from ..models.float_formats import library

FLOAT16_MAX, FLOAT16_MIN_NORMAL = 65504.0, 2.0**-14


def to_fast_backend(array: mx.array):
    """A float32 array for the library that is faster on this machine, row-contiguous.

    It may share memory with the original and must not be written to.
    """
    # Imported on first use, because reading a recipe imports this module.
    import numpy

    array = mx.contiguous(array)
    return numpy.asarray(array) if on_cpu() else array


def sum_dtype() -> mx.Dtype:
    """The dtype of sums over calibration tokens, where they are added up.

    Rounded to float32 afterwards, a float64 sum does not depend on its order, and so
    not on the number of processes. No GPU has float64.
    """
    return mx.float64 if on_cpu() else mx.float32


@mx.compile
def added(total: mx.array, value: mx.array) -> mx.array:
    """The sum in the dtype of the total. Compiled: the value is not converted first."""
    return total + value.astype(total.dtype)


def async_eval(arrays: tuple) -> None:
    """Start the evaluation of MLX arrays. NumPy arrays are evaluated already."""
    mx.async_eval([array for array in arrays if library(array) is mx])


def compiled_for(array, function: Callable) -> Callable:
    """The function, compiled if the array is an MLX array."""
    return _compile(function) if library(array) is mx else function


_compile = cache(mx.compile)


def compiled(function: Callable) -> Callable:
    """Compile calls whose first argument is an MLX array."""

    @wraps(function)
    def call(*arrays):
        return compiled_for(arrays[0], function)(*arrays)

    return call


def round_to_dtype(array, dtype: mx.Dtype):
    """Round float32 values to the nearest values of `dtype`; the result is float32."""
    if dtype == mx.float32:
        return array
    backend = library(array)
    if backend is mx and dtype == mx.float16 and on_cpu():
        return _round_to_float16(array)
    if backend is mx:
        return array.astype(dtype).astype(mx.float32)
    if dtype == mx.float16:
        return array.astype(backend.float16).astype(backend.float32)
    assert dtype == mx.bfloat16, dtype
    # Keep the upper half of the bits, rounded to the nearest, ties to even.
    bits = array.view(backend.uint32)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits & backend.uint32(0xFFFF0000)).view(backend.float32)


@mx.compile
def _round_to_float16(array: mx.array) -> mx.array:
    """Float32 values, rounded in their own bits.

    MLX's conversion to float16 takes ten times as long on a CPU.
    """
    bits = array.view(mx.uint32)
    # Keep 10 bits of the fraction, rounded to the nearest, ties to even.
    normal = ((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000).view(mx.float32)
    normal = mx.where(mx.abs(normal) > FLOAT16_MAX, normal * math.inf, normal)
    # Subnormal values are multiples of 2^-24, the distance of values around .75.
    subnormal = (array + 0.75) - 0.75
    return mx.where(mx.abs(array) < FLOAT16_MIN_NORMAL, subnormal, normal)
